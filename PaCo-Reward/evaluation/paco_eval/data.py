"""Data sets of edits from the hub or from disk, whose images stay undecoded: a broken image affects only its row."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from paco_eval.results import BenchError, Row, first_line, read_rows
from paco_judge.images import UnreadableImage, read_image


@dataclass(frozen=True)
class Source:
    """Rows without their images. ``stored``: the images of one row, paths relative to ``root`` or dicts of bytes."""

    root: Path
    rows: list[Row]
    columns: tuple[str, str]  # of the images: before the edit, after two edits
    stored: Callable[[int], Row]

    def pictures(self, index: int) -> list[Image.Image]:
        """A row's image and its two edits, RGB. Raises ValueError, naming the column; KeyError."""
        before, after = self.columns
        row = self.stored(index)
        if not isinstance(row[after], list) or len(row[after]) != 2:
            raise ValueError(f"{after} must hold 2 images")
        named = {before: row[before]} | {f"{after}[{n}]": image for n, image in enumerate(row[after])}
        return [open_image(image, self.root, column) for column, image in named.items()]


def open_source(
    dataset: str | None, hub_name: str, texts: tuple[str, ...], images: tuple[str, str], split: str | None = None
) -> Source:
    """Open a data set.

    Args:
        dataset: Hub name, folder of ``save_to_disk``, folder of parquet files or with one .jsonl file, or such a
            file. Default: the folder named as the data set in ., .. or ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``, in messages about its download.
        texts, images: Columns that are needed.
        split: Default: train, or the only one.

    Raises BenchError: The data set is missing, not readable, empty, or lacks a column.
    """
    local_name = hub_name.partition("/")[2]
    if not dataset:
        places = (Path(place) / local_name for place in (".", "..", "../.."))
        dataset = next((str(folder) for folder in places if folder.is_dir()), hub_name)
    path = Path(dataset).expanduser()
    if path.is_dir() and not any(path.rglob("*.parquet")) and len(found := sorted(path.rglob("*.jsonl"))) == 1:
        path = found[0]
    if path.is_file() and path.suffix == ".jsonl":
        rows = read_rows(path)
        columns, stored = {column for row in rows for column in row}, rows.__getitem__
    else:
        try:
            loaded = _load(dataset, path, split)
        except BenchError:
            raise
        except Exception as error:  # hub, network, cache and format errors share no base class
            remedy = f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}` (HF_ENDPOINT: a mirror)"
            raise BenchError(f"dataset {dataset} cannot be read: {first_line(error)}; download it with {remedy}") from error
        columns = loaded.column_names
        undecoded = loaded.with_format("arrow")
        rows = undecoded.select_columns([name for name in texts if name in columns])[:].to_pylist()
        stored = lambda index: undecoded[index].to_pylist()[0]
    missing = [column for column in (*texts, *images) if column not in columns]
    if missing or not rows:
        lack = f"lacks the columns {', '.join(missing)}" if rows else "holds no rows"
        raise BenchError(f"dataset {dataset} {lack}; it has {', '.join(sorted(columns))}")
    return Source(path if path.is_dir() else path.parent, rows, images, stored)


def _load(name: str, path: Path, split: str | None) -> Any:
    """The split of a data set of the package ``datasets``."""
    import datasets

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
    elif path.exists():
        files = [str(file) for file in ([path] if path.is_file() else sorted(path.rglob("*.parquet")))]
        loaded = datasets.load_dataset("parquet", data_files=files, split="train")
    else:
        loaded = datasets.load_dataset(name)
    if not isinstance(loaded, dict):
        return loaded
    wanted = split or ("train" if "train" in loaded or len(loaded) > 1 else next(iter(loaded)))
    if wanted not in loaded:
        raise BenchError(f"dataset {name} has the splits {', '.join(loaded)}; choose one with --split")
    return loaded[wanted]


def open_image(stored: Any, root: Path, column: str) -> Image.Image:
    """An RGB image of a data set's cell: a path relative to ``root``, encoded bytes, or a dict with either.

    Raises ValueError, naming ``column``: There is none, or it cannot be read.
    """
    if isinstance(stored, dict):
        stored = stored.get("bytes") or stored.get("path")
    if not isinstance(stored, (bytes, str)) or not stored:
        raise ValueError(f"{column} holds no image but {stored!r}")
    try:
        return read_image(stored if isinstance(stored, bytes) else root / stored)
    except UnreadableImage as error:
        raise ValueError(f"image {column} {'' if isinstance(stored, bytes) else stored} {error}") from error
