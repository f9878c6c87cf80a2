"""EditReward-Bench: its rows (from the hub or from disk) and the pairs that each row asks about."""

from collections.abc import Sequence
from functools import partial

from paco_eval.data import Source, open_source
from paco_eval.results import ItemError, Row
from paco_eval.runner import Item, Prepared, broken, open_image
from paco_judge.client import Pair
from paco_judge.questions import Question, editing_texts
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")


def load_bench(
    dataset: str | None, questions: Sequence[Question], split: str | None = None, resize_edits: bool = False
) -> list[Item]:
    """Read all rows but not their images.

    Args:
        dataset, split: As in ``open_source``.
        questions: One or two (``paco_judge.questions.load_editing_questions``).
        resize_edits: Give every edit the size of its input image (Pillow's default resampling).

    Raises:
        BenchError: The data set is missing, not readable, empty, or lacks a column.
    """
    source = open_source(dataset, HUB_NAME, TEXT_COLUMNS, IMAGE_COLUMNS, split)
    items = []
    for index, row in enumerate(source.rows):
        fields = {"index": index, "key": row.get("key"), "dimension": row.get("dimension")}
        try:
            if not isinstance(fields["key"], list) or len(fields["key"]) != 2:
                raise ValueError(f"key must name two edits, not {fields['key']!r}")
            if not isinstance(row["task_type"], str):
                raise TypeError(f"task_type must be a text, not {row['task_type']!r}")
            asked = editing_texts(questions, row["instruction"], row["dimension"])
            make = partial(prepare, source, index, row["task_type"], asked, resize_edits)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            make = partial(broken, f"has no {error}" if isinstance(error, KeyError) else error)
        items.append(Item(fields, f"row {index} {fields['key']} {fields['dimension']}", make))
    return items


def prepare(source: Source, index: int, task_type: str, asked: dict[str, str], resize_edits: bool) -> Prepared:
    """A row's pairs (all questions on the better edit, then on the worse), and the function that makes its result.

    Args:
        source, index: The row with two edits of one image, the better one first.
        task_type: The kind of edit.
        asked: Questions by the dimension that each is about.
        resize_edits: As in ``load_bench``.

    Raises:
        ItemError: Not one input and two outputs, or an unreadable image.
    """
    stored = source.images(index)
    outputs = stored.get("output_images")
    if not isinstance(outputs, list) or len(outputs) != 2:
        raise ItemError("output_images must hold 2 images, the better first")
    before = open_image(stored.get("input_image"), source.root, "input_image")
    edits = [open_image(image, source.root, f"output_images[{i}]") for i, image in enumerate(outputs)]
    if resize_edits:
        edits = [edit.resize(before.size) for edit in edits]
    pairs = [Pair(before, edit, question) for edit in edits for question in asked.values()]

    def to_row(values: list[float]) -> Row:
        answers = [dict(zip(asked, values[: len(asked)])), dict(zip(asked, values[len(asked) :]))]
        scores = [editing_score(*map(Verdict, answer.values())) for answer in answers]
        return {"task_type": task_type, "answers": answers, "scores": scores}

    return pairs, to_row
