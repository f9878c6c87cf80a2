"""EditReward-Bench: its rows (from the hub or from disk) and the pairs that each row asks about."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from paco_eval.results import BenchError, ItemError, first_line, read_jsonl
from paco_eval.runner import Benchmark, Prepared, read_image
from paco_judge.client import Pair
from paco_judge.questions import Question, editing_texts
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
LOCAL_NAME = "EditReward-Bench"
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")
DOWNLOAD = f"`hf download {HUB_NAME} --repo-type dataset --local-dir {LOCAL_NAME}`"


@dataclass(frozen=True)
class Source:
    """Rows without their images, and a function that returns the stored images of one row."""

    root: Path  # relative image paths start here
    rows: list[dict[str, Any]]
    images: Callable[[int], dict[str, Any]]  # values: paths, or dicts of bytes and path


@dataclass(frozen=True)
class EditRow:
    """Two edits of one image with one instruction, the better one first."""

    index: int  # position in the data set
    edits: tuple[str, str]  # the row's ``key``: one name for each edit
    task_type: str
    dimension: str
    questions: dict[str, str]  # dimension that it asks about -> question

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Identifies the row in a results file."""
        return self.index, *self.edits, self.dimension

    @property
    def name(self) -> str:
        """In messages."""
        return row_name(self.index, self.edits, self.dimension)


def row_name(index: int, edits: Any, dimension: Any) -> str:
    """``row 12 [a, b] consistency``; unknown parts are left out."""
    edits = f"[{', '.join(map(str, edits))}]" if isinstance(edits, list | tuple) else edits
    return " ".join(["row", str(index), *(str(part) for part in (edits, dimension) if part)])


def load_bench(
    dataset: str | None, questions: Sequence[Question], split: str | None = None, resize_edits: bool = False
) -> Benchmark:
    """Read all rows but not their images. Broken rows are listed, not raised.

    Args:
        dataset: Hub name, folder or file; default: ``EditReward-Bench`` in ., .. or ../.., else the name on the hub.
        questions: One or two (``paco_judge.questions.load_editing_questions``).
        split: Default: train, or the only one.
        resize_edits: Give every edit the size of its input image (Pillow's default resampling).

    Raises:
        BenchError: The data set is missing, not readable, empty, or lacks a column.
    """
    if not dataset:
        local = (Path(place) / LOCAL_NAME for place in (".", "..", "../.."))
        dataset = next((str(folder) for folder in local if folder.is_dir()), HUB_NAME)
    source = _open_source(dataset, split)
    if not source.rows:
        raise BenchError(f"dataset {dataset} holds no rows")
    bench = Benchmark(
        prepare=partial(prepare, source, resize_edits=resize_edits),
        row_key=lambda row: (row["index"], *row["key"], row["dimension"]),
    )
    for index, raw in enumerate(source.rows):
        try:
            bench.items.append(_row(index, raw, questions))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            bench.broken.append((row_name(index, raw.get("key"), raw.get("dimension")), f"broken row: {reason}"))
    return bench


def _row(index: int, raw: dict[str, Any], questions: Sequence[Question]) -> EditRow:
    edits, texts = raw["key"], {name: raw[name] for name in ("instruction", "task_type", "dimension")}
    if not isinstance(edits, list) or len(edits) != 2:
        raise ValueError(f"key must name two edits, not {edits!r}")
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name} must be a text, not {text!r}")
    asked = editing_texts(questions, texts["instruction"], texts["dimension"])
    return EditRow(index, (str(edits[0]), str(edits[1])), texts["task_type"], texts["dimension"], asked)


def prepare(source: Source, row: EditRow, resize_edits: bool = False) -> Prepared:
    """A row's pairs (all questions on the better edit, then on the worse), and the function that makes its result.

    Raises:
        ItemError: Not one input and two outputs, or an unreadable image.
    """
    try:
        stored = source.images(row.index)
        reference, outputs = stored["input_image"], stored["output_images"]
    except (KeyError, OSError, ValueError) as error:
        raise ItemError(f"its images cannot be read: {error!r}") from error
    if not isinstance(outputs, list) or len(outputs) != 2:
        number = f"{len(outputs)} images" if isinstance(outputs, list) else f"a {type(outputs).__name__}"
        raise ItemError(f"output_images must hold 2 images, the better first, not {number}")
    before = _open_image(reference, source.root, "input_image")
    edits = [_open_image(image, source.root, f"output_images[{i}]") for i, image in enumerate(outputs)]
    if resize_edits:
        edits = [edit.resize(before.size) for edit in edits]
    pairs = [Pair(before, edit, question) for edit in edits for question in row.questions.values()]

    def to_row(values: list[float]) -> dict[str, Any]:
        asked = len(row.questions)
        answers = [dict(zip(row.questions, values[:asked])), dict(zip(row.questions, values[asked:]))]
        return {
            "index": row.index,
            "key": list(row.edits),
            "task_type": row.task_type,
            "dimension": row.dimension,
            "answers": answers,
            "scores": [editing_score(*map(Verdict, answer.values())) for answer in answers],
        }

    return pairs, to_row


def _open_image(stored: Any, root: Path, column: str) -> Image.Image:
    if isinstance(stored, dict):
        stored = stored.get("bytes") or stored.get("path")
    if isinstance(stored, bytes):
        return read_image(stored, column)
    if not isinstance(stored, str) or not stored:
        raise ItemError(f"{column} holds no image but {stored!r}")
    return read_image(root / stored, f"{column} {root / stored}")


def _open_source(name: str, split: str | None) -> Source:
    path = Path(name).expanduser()
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            raise BenchError(
                f"dataset {name} does not exist; download it with {DOWNLOAD} and pass --dataset {LOCAL_NAME}"
            )
        problem = (
            f"dataset {name} is not a local folder and could not be loaded from the hub (set HF_ENDPOINT to a mirror "
            f"that you can reach, or download it elsewhere with {DOWNLOAD} and pass --dataset {LOCAL_NAME})"
        )
        loaded = _load(lambda datasets: datasets.load_dataset(name), problem, quiet=False)
        return _from_dataset(loaded, Path("."), name, split)
    problem, root = f"dataset {path} cannot be read", path if path.is_dir() else path.parent
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_dataset(_load(lambda datasets: datasets.load_from_disk(str(path)), problem), root, name, split)
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet")) or sorted(path.rglob("*.jsonl"))
    if not files:
        raise BenchError(
            f"dataset folder {path} holds no parquet files, no JSON lines and no saved data set; download it with "
            f"{DOWNLOAD}"
        )
    if len(files) == 1 and files[0].suffix == ".jsonl":
        return _from_jsonl(files[0])
    if any(file.suffix != ".parquet" for file in files):
        found = ", ".join(file.name for file in files[:5])
        raise BenchError(f"dataset {path}: pass one .jsonl file, or .parquet files, not {found}")
    names = [str(file) for file in files]
    loaded = _load(lambda datasets: datasets.load_dataset("parquet", data_files=names, split="train"), problem)
    return _from_dataset(loaded, root, name, split)


def _load(load: Callable[[Any], Any], problem: str, quiet: bool = True) -> Any:
    try:
        import datasets

        if quiet:
            datasets.disable_progress_bars()
        return load(datasets)
    except ImportError as error:
        raise BenchError(f"the package datasets cannot be imported ({error}); run: bash setup.sh") from error
    except Exception as error:  # hub, network, cache and format errors share no base class
        raise BenchError(f"{problem}: {first_line(error)}") from error


def _from_dataset(loaded: Any, root: Path, name: str, split: str | None) -> Source:
    """A Hugging Face data set. Images are read undecoded, so that a broken image affects only its row."""
    if isinstance(loaded, dict):
        wanted = split or ("train" if "train" in loaded else next(iter(loaded)))
        if wanted not in loaded or (split is None and "train" not in loaded and len(loaded) > 1):
            raise BenchError(f"dataset {name} has the splits {', '.join(loaded)}; choose one with --split")
        loaded = loaded[wanted]
    _check_columns(loaded.column_names, root)
    rows = loaded.select_columns(list(TEXT_COLUMNS)).with_format("arrow")[:].to_pylist()
    images = loaded.select_columns(list(IMAGE_COLUMNS)).with_format("arrow")
    return Source(root, rows, lambda index: images[index].to_pylist()[0])


def _from_jsonl(file: Path) -> Source:
    """JSON lines; a row that lacks a column affects only itself."""
    rows = read_jsonl(file)
    if rows:
        _check_columns({column for row in rows for column in row}, file)
    return Source(file.parent, rows, rows.__getitem__)


def _check_columns(columns: Collection[str], name: Path) -> None:
    missing = [column for column in (*TEXT_COLUMNS, *IMAGE_COLUMNS) if column not in columns]
    if missing:
        raise BenchError(
            f"dataset {name} lacks the columns {', '.join(missing)}; it has {', '.join(sorted(columns)) or 'none'}"
        )
