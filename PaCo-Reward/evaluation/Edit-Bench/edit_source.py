"""Where EditReward-Bench's rows come from: the hub, a saved data set, parquet files, or JSON lines with image paths."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_eval.errors import BenchError, ItemError

HUB_NAME = "EditScore/EditReward-Bench"
LOCAL_NAME = "EditReward-Bench"
TEXTS = ("key", "instruction", "task_type", "dimension")
IMAGES = ("input_image", "output_images")
DOWNLOAD = f"`hf download {HUB_NAME} --repo-type dataset --local-dir {LOCAL_NAME}`"


@dataclass(frozen=True)
class Source:
    """Rows without their images, and a way to the images of one row, as stored (paths, or dicts of bytes and path)."""

    root: Path  # what relative image paths are relative to
    rows: list[dict[str, Any] | ItemError]
    images: Callable[[int], dict[str, Any]]


def find_source(name: str | None) -> str:
    """What `--dataset` names, or the first `EditReward-Bench` in ., .., ../.., or the name on the hub."""
    if name:
        return name
    here = (Path(place) / LOCAL_NAME for place in (".", "..", "../.."))
    return next((str(folder) for folder in here if folder.is_dir()), HUB_NAME)


def open_source(name: str, split: str | None = None) -> Source:
    """Open a local file or folder, or a data set of the hub.

    Raises:
        BenchError: not there, not readable, without rows, or without a column; the message says what to do.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        source = _folder(path, split)
    elif path.is_file():
        source = _files([path], path)
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise BenchError(f"dataset {name} does not exist; download it with {DOWNLOAD} and pass --dataset {LOCAL_NAME}")
    else:
        source = _hub(name, split)
    if not source.rows:
        raise BenchError(f"dataset {name} holds no rows")
    return source


def _folder(folder: Path, split: str | None) -> Source:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        from_disk = _load(lambda datasets: datasets.load_from_disk(str(folder)), f"dataset {folder} cannot be read")
        return _dataset(_one_split(from_disk, split, str(folder)), folder)
    for suffix in ("parquet", "jsonl"):
        files = sorted(folder.rglob(f"*.{suffix}"))
        if files:
            return _files(files, folder)
    raise BenchError(
        f"dataset folder {folder} holds no parquet files, no JSON lines and no saved data set; download it with "
        f"{DOWNLOAD}"
    )


def _files(files: list[Path], place: Path) -> Source:
    if all(file.suffix == ".parquet" for file in files):
        names = [str(file) for file in files]
        from_parquet = _load(
            lambda datasets: datasets.load_dataset("parquet", data_files=names, split="train"),
            f"dataset {place} cannot be read",
        )
        return _dataset(from_parquet, place if place.is_dir() else place.parent)
    if len(files) == 1 and files[0].suffix == ".jsonl":
        return _jsonl(files[0])
    found = ", ".join(file.name for file in files[:5])
    raise BenchError(f"dataset {place}: pass one .jsonl file, or .parquet files; this is {found}")


def _hub(name: str, split: str | None) -> Source:
    problem = (
        f"dataset {name} is neither a local folder nor can it be had from the hub (set HF_ENDPOINT to a mirror you can "
        f"reach, or download it elsewhere with {DOWNLOAD} and pass --dataset {LOCAL_NAME})"
    )
    from_hub = _load(lambda datasets: datasets.load_dataset(name), problem, quiet=False)
    return _dataset(_one_split(from_hub, split, name), Path("."))


def _load(load: Callable[[Any], Any], problem: str, quiet: bool = True) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BenchError(f"the package datasets cannot be imported here ({error}); run: bash setup.sh") from error
    if quiet:
        datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:  # hub, network, cache and format errors share no class
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BenchError(f"{problem}: {cause}") from error


def _one_split(loaded: Any, split: str | None, name: str) -> Any:
    if not isinstance(loaded, dict):  # a single data set, not one for each split
        return loaded
    wanted = split or ("train" if "train" in loaded else next(iter(loaded)))
    if wanted not in loaded or (split is None and "train" not in loaded and len(loaded) > 1):
        raise BenchError(f"dataset {name} has the splits {', '.join(loaded)}; choose one with --split")
    return loaded[wanted]


def _dataset(dataset: Any, root: Path) -> Source:
    """A Hugging Face data set, read as stored: a broken image is then one row's problem."""
    _check_columns(dataset.column_names, str(root))
    rows = dataset.select_columns(list(TEXTS)).with_format("arrow")[:].to_pylist()
    pictures = dataset.select_columns(list(IMAGES)).with_format("arrow")
    return Source(root, rows, lambda index: pictures[index].to_pylist()[0])


def _jsonl(file: Path) -> Source:
    """JSON lines; a line that is no object is that row's problem."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BenchError(f"dataset {file} cannot be read: {error}") from error
    rows: list[dict[str, Any] | ItemError] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            row = ItemError(f"broken row: {error}")
        rows.append(row if isinstance(row, dict | ItemError) else ItemError("broken row: not a JSON object"))
    columns = {column for row in rows if isinstance(row, dict) for column in row}
    if rows:
        _check_columns(columns, str(file))
    return Source(file.parent, rows, rows.__getitem__)


def _check_columns(columns: Any, name: str) -> None:
    missing = [column for column in (*TEXTS, *IMAGES) if column not in columns]
    if missing:
        raise BenchError(
            f"dataset {name} lacks the columns {', '.join(missing)}; it has {', '.join(sorted(columns)) or 'none'}"
        )
