"""Data sets from the hub or from disk, whose images stay undecoded: a broken image affects only its row."""

from collections.abc import Callable, Collection, Sequence
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
    download = f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}`"
    if not dataset:
        places = (Path(place) / local_name for place in (".", "..", "../.."))
        dataset = next((str(folder) for folder in places if folder.is_dir()), hub_name)
    path = Path(dataset).expanduser()
    if path.is_dir() and not any(path.rglob("*.parquet")) and len(found := sorted(path.rglob("*.jsonl"))) == 1:
        path = found[0]
    if path.is_file() and path.suffix == ".jsonl":
        rows = read_jsonl(path)
        source = Source(path.parent, rows, rows.__getitem__)
        _check(dataset, {column for row in rows for column in row}, rows, (*texts, *images))
        return source
    remedy = f"; download it with {download} and pass --dataset {local_name}"
    if not path.exists() and (path.is_absolute() or dataset.startswith((".", "~")) or dataset.count("/") != 1):
        raise BenchError(f"dataset {dataset} does not exist{remedy}")
    loaded = _load(dataset, path, remedy)
    if isinstance(loaded, dict):
        wanted = split or ("train" if "train" in loaded else next(iter(loaded)))
        if wanted not in loaded or (split is None and "train" not in loaded and len(loaded) > 1):
            raise BenchError(f"dataset {dataset} has the splits {', '.join(loaded)}; choose one with --split")
        loaded = loaded[wanted]
    _check(dataset, loaded.column_names, loaded, (*texts, *images))
    rows = loaded.select_columns(list(texts)).with_format("arrow")[:].to_pylist()
    stored = loaded.select_columns(list(images)).with_format("arrow")
    return Source(path if path.is_dir() else path.parent, rows, lambda index: stored[index].to_pylist()[0])


def _load(name: str, path: Path, remedy: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BenchError("this needs the package datasets; run: pip install datasets") from error
    try:
        if not path.exists():
            return datasets.load_dataset(name)
        datasets.disable_progress_bars()
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        files = [str(file) for file in ([path] if path.is_file() else sorted(path.rglob("*.parquet")))]
        if not files:
            raise FileNotFoundError(f"it holds no parquet files{remedy}")
        return datasets.load_dataset("parquet", data_files=files, split="train")
    except Exception as error:  # hub, network, cache and format errors share no base class
        hint = "" if path.exists() else f" (set HF_ENDPOINT to a mirror that you can reach){remedy}"
        raise BenchError(f"dataset {name} cannot be read: {first_line(error)}{hint}") from error


def _check(name: str, columns: Collection[str], rows: Any, needed: Sequence[str]) -> None:
    if not len(rows):
        raise BenchError(f"dataset {name} holds no rows")
    if missing := [column for column in needed if column not in columns]:
        raise BenchError(f"dataset {name} lacks the columns {', '.join(missing)}; it has {', '.join(sorted(columns))}")
