"""EditReward-Bench: its rows (from the hub or from disk) and the pairs that each row asks about."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paco_eval.data import Source, open_source
from paco_eval.results import ItemError
from paco_eval.runner import Benchmark, Prepared, open_image
from paco_judge.client import Pair
from paco_judge.questions import Question, editing_texts
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")


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
        return f"row {self.index} [{', '.join(self.edits)}] {self.dimension}"


def load_bench(
    dataset: str | None, questions: Sequence[Question], split: str | None = None, resize_edits: bool = False
) -> Benchmark:
    """Read all rows but not their images. Broken rows are listed, not raised.

    Args:
        dataset, split: As in ``open_source``.
        questions: One or two (``paco_judge.questions.load_editing_questions``).
        resize_edits: Give every edit the size of its input image (Pillow's default resampling).

    Raises:
        BenchError: The data set is missing, not readable, empty, or lacks a column.
    """
    source = open_source(dataset, HUB_NAME, TEXT_COLUMNS, IMAGE_COLUMNS, split)
    bench = Benchmark(
        prepare=partial(prepare, source, resize_edits=resize_edits),
        row_key=lambda row: (row["index"], *row["key"], row["dimension"]),
    )
    for index, raw in enumerate(source.rows):
        try:
            bench.items.append(_row(index, raw, questions))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            bench.broken.append((f"row {index} {raw.get('key')} {raw.get('dimension')}", f"broken row: {reason}"))
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
    stored = source.images(row.index)
    outputs = stored.get("output_images")
    if not isinstance(outputs, list) or len(outputs) != 2:
        raise ItemError("output_images must hold 2 images, the better first")
    before = open_image(stored.get("input_image"), source.root, "input_image")
    edits = [open_image(image, source.root, f"output_images[{i}]") for i, image in enumerate(outputs)]
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
