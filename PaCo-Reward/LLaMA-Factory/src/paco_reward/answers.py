"""What a judge says about some images: about all pairs of them, or about edits of the first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from paco_judge.client import Pair
from paco_judge.grid import pairs as index_pairs
from paco_judge.questions import EDITING, editing_texts, load_editing_questions, load_question
from paco_judge.verdict import Verdict, editing_score, mean_score
from paco_reward.errors import PacoRewardError


@dataclass(frozen=True)
class Judge:
    """A judge in this process or behind a server.

    Attributes:
        name: For people.
        score: P(Yes) or an error for each pair.
        explain: The whole answer to each pair.
    """

    name: str
    score: Callable[[Sequence[Pair]], list[Verdict]]
    explain: Callable[[Sequence[Pair]], list[str]]


@dataclass(frozen=True)
class Asked:
    """Images and the questions about them.

    Attributes:
        images: Two or more, RGB.
        names: One for each image.
        questions: One under ``""``, on every pair of images; or, about edits of the first image, each under its dimension.
    """

    images: Sequence[Image.Image]
    names: Sequence[str]
    questions: Mapping[str, str]

    @property
    def about_edits(self) -> bool:
        """Whether the images after the first are edits of it."""
        return "" not in self.questions

    @property
    def cells(self) -> list[tuple[int, int, str]]:
        """The image numbers and the dimension of every question, in the order of ``pairs``."""
        if self.about_edits:
            return [(0, edit, dimension) for edit in range(1, len(self.images)) for dimension in self.questions]
        return [(i, j, "") for i, j in index_pairs(len(self.images))]

    @property
    def pairs(self) -> list[Pair]:
        """What the judge is asked."""
        return [Pair(self.images[i], self.images[j], self.questions[about]) for i, j, about in self.cells]


@dataclass(frozen=True)
class Answers:
    """``verdicts`` and, if they were asked for, ``reasons``: one for each of ``asked.pairs``."""

    judge: str
    asked: Asked
    verdicts: Sequence[Verdict]
    reasons: Sequence[str] = field(default=())

    @property
    def missing(self) -> int:
        """How many questions have no score."""
        return sum(not verdict.ok for verdict in self.verdicts)

    @property
    def mean(self) -> float | None:
        """Mean over all pairs; None if one has no score."""
        return mean_score(self.verdicts)

    def of_edit(self, number: int) -> dict[str, Verdict]:
        """The verdicts on image ``number`` by dimension; with both questions also ``overall``."""
        own = {
            about: verdict
            for (_, j, about), verdict in zip(self.asked.cells, self.verdicts, strict=True)
            if j == number
        }
        if len(own) > 1:
            overall = editing_score(*own.values())
            own["overall"] = Verdict(overall, None if overall is not None else "an answer is missing")
        return own


def questions_about(
    theme: str | None = None, instruction: str | None = None, templates: Sequence[str] | None = None
) -> dict[str, str]:
    """``Asked.questions``: on pairs with or without a theme, or, given an instruction, on edits.

    Args:
        templates: Shipped names or text files: one, or for edits up to two. Default: theme, pair, or the editing questions.

    Raises:
        PacoRewardError: The instruction is empty, or a template cannot be used here.
    """
    try:
        if instruction is not None:
            return editing_texts(load_editing_questions(templates or EDITING), instruction)
        about, default = (("theme",), "theme") if theme else ((), "pair")
        question, *others = templates or [default]
        if others:
            raise ValueError("--question: only edits (--instruction) are asked about with two questions")
        return {"": load_question(question, about).text(theme=theme)}
    except ValueError as error:
        raise PacoRewardError(str(error)) from error
