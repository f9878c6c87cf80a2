"""Data sets from the hub or from disk, whose images stay undecoded: a broken image affects only its row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_eval.results import BenchError, first_line, read_jsonl


@dataclass(frozen=True)
class Source:
    """Rows without their images, and a function that returns the stored images of one row."""

    root: Path  # relative image paths start here
    rows: list[dict[str, Any]]
    images: Callable[[int], dict[str, Any]]  # values: paths, or dicts of bytes and path


def open_source(
    dataset: str | None, hub_name: str, texts: Sequence[str], images: Sequence[str], split: str | None = None
) -> Source:
    """Open a data set.

    Args:
        dataset: Hub name, folder of ``save_to_disk``, folder of parquet files or with one .jsonl file, or such a
            file. Default: the folder named as the data set in ., .. or ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``, in messages about its download.
        texts, images: Columns that are needed.
        split: Default: train, or the only one.

    Raises:
        BenchError: The data set is missing, not readable, empty, or lacks a column.
    """
    local_name = hub_name.partition("/")[2]
    if not dataset:
        places = (Path(place) / local_name for place in (".", "..", "../.."))
        dataset = next((str(folder) for folder in places if folder.is_dir()), hub_name)
    path = Path(dataset).expanduser()
    if path.is_dir() and not any(path.rglob("*.parquet")) and len(found := sorted(path.rglob("*.jsonl"))) == 1:
        path = found[0]
    if path.is_file() and path.suffix == ".jsonl":
        rows = loaded = read_jsonl(path)
        columns, stored = {column for row in rows for column in row}, rows.__getitem__
    else:
        remedy = f"; download it with `hf download {hub_name} --repo-type dataset --local-dir {local_name}`"
        loaded = _load(dataset, path, split, remedy)
        columns = loaded.column_names
    if not len(loaded):
        raise BenchError(f"dataset {dataset} holds no rows")
    if missing := [column for column in (*texts, *images) if column not in columns]:
        raise BenchError(
            f"dataset {dataset} lacks the columns {', '.join(missing)}; it has {', '.join(sorted(columns))}"
        )
    if not isinstance(loaded, list):
        rows = loaded.select_columns(list(texts)).with_format("arrow")[:].to_pylist()
        undecoded = loaded.select_columns(list(images)).with_format("arrow")
        stored = lambda index: undecoded[index].to_pylist()[0]
    return Source(path if path.is_dir() else path.parent, rows, stored)


def _load(name: str, path: Path, split: str | None, remedy: str) -> Any:
    """The split of a data set of the package ``datasets``. Raises BenchError."""
    import datasets

    if path.exists():
        datasets.disable_progress_bars()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        elif path.exists():
            files = [str(file) for file in ([path] if path.is_file() else sorted(path.rglob("*.parquet")))]
            if not files:
                raise FileNotFoundError("it holds no parquet files")
            loaded = datasets.load_dataset("parquet", data_files=files, split="train")
        else:
            loaded = datasets.load_dataset(name)
    except Exception as error:  # hub, network, cache and format errors share no base class
        hint = "" if path.exists() else " (set HF_ENDPOINT to a mirror that you can reach)"
        raise BenchError(f"dataset {name} cannot be read: {first_line(error)}{hint}{remedy}") from error
    if not isinstance(loaded, dict):
        return loaded
    wanted = split or ("train" if "train" in loaded else next(iter(loaded)))
    if wanted not in loaded or (split is None and "train" not in loaded and len(loaded) > 1):
        raise BenchError(f"dataset {name} has the splits {', '.join(loaded)}; choose one with --split")
    return loaded[wanted]
