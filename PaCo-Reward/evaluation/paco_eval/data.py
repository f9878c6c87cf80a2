"""Data sets of edits from the hub or from disk, whose images stay undecoded: a broken image affects only its row."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from paco_eval.results import BenchError, Row, first_line, read_rows
from paco_judge.images import UnreadableImage, read_image

# Reads a row's image and its two edits, RGB. Raises ValueError, which names the column, or KeyError.
Pictures = Callable[[], list[Image.Image]]


def open_source(
    dataset: str | None, hub_name: str, texts: tuple[str, ...], images: tuple[str, str]
) -> list[tuple[Row, Pictures]]:
    """The rows of a data set. Raises BenchError: It is missing, not readable, or lacks a column.

    Args:
        dataset: Hub name, folder of ``save_to_disk`` or of parquet files, or a .jsonl file, to which image paths are
            relative. Default: the folder named as the data set in ., .. or ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``.
        texts, images: Columns that are needed; ``images``: of the image before the edit, and of two edits.
    """
    local_name = hub_name.partition("/")[2]
    places = (Path(place) / local_name for place in (".", "..", "../.."))
    # The folder of a benchmark's code may have the data set's name; it counts if the data set was downloaded to it.
    local = (
        f
        for f in places
        if f.is_dir() and ((f / "data").is_dir() or not (f / "evaluation.py").is_file())
    )
    path = Path(dataset or next(local, hub_name)).expanduser()
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        columns, stored = {column for row in rows for column in row}, rows.__getitem__
    else:
        try:
            loaded = _load(path)
        except Exception as error:  # hub, network, cache and format errors share no base class
            remedy = f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}` (HF_ENDPOINT: a mirror)"
            raise BenchError(
                f"dataset {path} cannot be read: {first_line(error)}; download it with {remedy}"
            ) from error
        columns = loaded.column_names
        undecoded = loaded.with_format("arrow")
        rows = undecoded.select_columns([name for name in texts if name in columns])[:].to_pylist()
        stored = lambda index: undecoded[index].to_pylist()[0]
    if missing := [column for column in (*texts, *images) if column not in columns]:
        raise BenchError(
            f"dataset {path} lacks the columns {', '.join(missing)}; it has {', '.join(sorted(columns))}"
        )
    root, (before, after) = path.parent if path.is_file() else path, images

    def read(index: int) -> list[Image.Image]:
        row = stored(index)
        if not isinstance(row[after], list) or len(row[after]) != 2:
            raise ValueError(f"{after} must hold 2 images")
        named = {before: row[before]} | {
            f"{after}[{n}]": image for n, image in enumerate(row[after])
        }
        return [_open(image, root, column) for column, image in named.items()]

    return [(row, partial(read, index)) for index, row in enumerate(rows)]


def _load(path: Path) -> Any:
    """A data set of the package ``datasets``: the split train, or without one all splits."""
    import datasets

    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    loaded = (datasets.load_from_disk if saved else datasets.load_dataset)(str(path))
    if not isinstance(loaded, dict):
        return loaded
    return (
        loaded["train"] if "train" in loaded else datasets.concatenate_datasets([*loaded.values()])
    )


def _open(stored: Any, root: Path, column: str) -> Image.Image:
    """The RGB image of a cell: a path relative to ``root``, encoded bytes, or a dict with either."""
    if isinstance(stored, dict):
        stored = stored.get("bytes") or stored.get("path")
    if not isinstance(stored, (bytes, str)) or not stored:
        raise ValueError(f"{column} holds no image but {stored!r}")
    try:
        return read_image(stored if isinstance(stored, bytes) else root / stored)
    except UnreadableImage as error:
        raise ValueError(
            f"image {column} {'' if isinstance(stored, bytes) else stored} {error}"
        ) from error
