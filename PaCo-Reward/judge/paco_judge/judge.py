"""A judge as a few lines of Python need it.

from paco_judge import Judge

judge = Judge.from_pretrained("X-GenGroup/PaCo-Reward-7B")   # in this process, with transformers
judge = Judge("http://127.0.0.1:8000")                       # or behind a server
judge.score("a.png", "b.png", theme="one red fox in four seasons")              # P(Yes)
judge.score_edit("before.png", "after.png", "make it blue")
judge.explain("a.png", "b.png")                                                 # Yes or No, and why
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.client import JudgeClient
from paco_judge.errors import UserError
from paco_judge.images import UnreadableImage, load_image
from paco_judge.questions import (
    DEFAULT_FORM,
    Pair,
    RequestForm,
    editing_texts,
    load_editing_questions,
    load_question,
)
from paco_judge.verdict import Answer, Verdict, editing_score

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 512  # tokens
PAIRS_AT_ONCE = 256  # of a list: their images are in memory, and a server's deadline is for them

AnyImage = str | Path | Image.Image  # a file, an http(s) URL, or an image in memory


class Judge:
    """A judge behind a server, or with ``from_pretrained`` in this process.

    Every method takes one pair of images, or lists of the same length; one image or text beside a
    list counts for all of it. A missing score is None, and the log says why. An image that cannot
    be read is an error (UnreadableImage), but in a list costs only its own pairs.

    Args:
        base_url: Address of an OpenAI-compatible server.
        model: Name under which it serves the judge; None: PaCo-Reward-7B, or its only model.
        api_key: The server's key, if it has one.
        form: How images and answers travel.
        **options: See ``JudgeClient``.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        *,
        api_key: str | None = None,
        form: RequestForm = DEFAULT_FORM,
        **options: Any,
    ) -> None:
        client = JudgeClient(base_url, model, api_key=api_key, form=form, **options)
        self._name: Callable[[], str] = lambda: f"{client.check()} at {client.base_url}"
        self._score: Callable[[Sequence[Pair]], list[Verdict]] = client.score
        self._write: Callable[[Sequence[Pair], int], list[Answer]] = client.generate

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        adapter: str | Path | None = None,
        *,
        batch_size: int = 32,
        form: RequestForm = DEFAULT_FORM,
    ) -> "Judge":
        """Load a judge on the first GPU, or on the CPU. Needs ``paco-judge[scorer]``.

        Args:
            model: Folder or hub name.
            adapter: Folder or hub name of a LoRA adapter for it.
            batch_size: Pairs per forward pass.
            form: How images and answers travel.

        Raises:
            ValueError: It is no judge, or weights are missing or do not fit.
            OSError, SafetensorError: The model's folder lacks a file, or one is damaged.
        """
        try:
            from paco_judge.scorer import JudgeScorer
        except ImportError as error:
            raise UserError(
                f"a judge in this process needs more packages ({error}): "
                "pip install 'paco-judge[scorer]'"
            ) from error
        judge = cls.__new__(cls)
        name = f"{model} with {adapter}" if adapter else str(model)
        judge._name = lambda: name
        scorer = JudgeScorer.from_pretrained(model, adapter, batch_size=batch_size, form=form)
        judge._score = scorer.score
        judge._write = scorer.reasons
        return judge

    @property
    def name(self) -> str:
        """Its folder or hub name, or its served name and address.

        Raises UserError: There is no server, or another model.
        """
        return self._name()

    def score(
        self,
        image_a: AnyImage | Sequence[AnyImage],
        image_b: AnyImage | Sequence[AnyImage],
        theme: str | Sequence[str] | None = None,
    ) -> Any:
        """P(Yes) to "are the two images consistent": a float, or a list of floats for lists.

        ``theme``: what both images are about, such as the first sentence of a grid's prompt.
        """
        rows, is_list = _pair_rows(image_a, image_b, theme)
        scores = list(map(_value_of, _asked(self.verdicts, rows, Verdict, is_list)))
        return scores if is_list else scores[0]

    def score_edit(
        self,
        source: AnyImage | Sequence[AnyImage],
        edited: AnyImage | Sequence[AnyImage],
        instruction: str | Sequence[str],
    ) -> Any:
        """sqrt(P(the rest is kept) · P(the instruction is followed)), or a list for lists."""
        (sources, edits, instructions), is_list = _broadcast(source, edited, instruction)
        questions = load_editing_questions()
        rows = []
        for before, after, text in zip(sources, edits, instructions, strict=True):
            for question in editing_texts(questions, text).values():
                rows.append((before, after, question))
        verdicts = _asked(self.verdicts, rows, Verdict, is_list)
        scores = []
        for answers in zip(verdicts[::2], verdicts[1::2], strict=True):
            for answer in answers:
                _value_of(answer)  # says why there is none
            scores.append(editing_score(*answers))
        return scores if is_list else scores[0]

    def explain(
        self,
        image_a: AnyImage | Sequence[AnyImage],
        image_b: AnyImage | Sequence[AnyImage],
        theme: str | Sequence[str] | None = None,
        max_tokens: int = LONGEST_ANSWER,
    ) -> Any:
        """The whole answer to ``score``'s question, Yes or No and reasons, or a list for lists."""
        rows, is_list = _pair_rows(image_a, image_b, theme)
        ask = partial(self.answers, max_tokens=max_tokens)
        texts = list(map(_value_of, _asked(ask, rows, Answer, is_list)))
        return texts if is_list else texts[0]

    def verdicts(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """P(Yes) to any questions about images, or the reason why there is none, in order."""
        return self._score(pairs)

    def answers(self, pairs: Sequence[Pair], max_tokens: int = LONGEST_ANSWER) -> list[Answer]:
        """Whole answers to any questions about images, in order."""
        return self._write(pairs, max_tokens)


Row = tuple[AnyImage, AnyImage, str]  # two images and a question about them


def _pair_rows(image_a: Any, image_b: Any, theme: Any) -> tuple[list[Row], bool]:
    (firsts, seconds, themes), is_list = _broadcast(image_a, image_b, theme)
    rows = []
    for first, second, text in zip(firsts, seconds, themes, strict=True):
        question = load_question("theme" if text else "pair").text(theme=text or "")
        rows.append((first, second, question))
    return rows, is_list


def _asked(
    ask: Callable[[list[Pair]], list], rows: Sequence[Row], kind: type, is_list: bool
) -> list:
    """What ``ask`` answers about each row, or in a list ``kind(None, why)`` for a bad image."""
    answers = {}
    for start in range(0, len(rows), PAIRS_AT_ONCE):
        images: dict[str | int, Image.Image] = {}  # each is loaded once
        pairs = {}
        for index, (*sources, question) in enumerate(rows[start : start + PAIRS_AT_ONCE], start):
            shown = []
            try:
                for image in sources:
                    key = id(image) if isinstance(image, Image.Image) else str(image)
                    if key not in images:
                        images[key] = load_image(image)
                    shown.append(images[key])
                pairs[index] = Pair(*shown, question)
            except UnreadableImage as error:
                if not is_list:
                    raise
                answers[index] = kind(None, str(error))
        answers |= zip(pairs, ask(list(pairs.values())), strict=True)
    return [answers[index] for index in range(len(rows))]


def _broadcast(*values: Any) -> tuple[list[list[Any]], bool]:
    """The arguments as lists of one length, and whether one of them was a list.

    Raises ValueError.
    """
    lengths = {len(value) for value in values if isinstance(value, (list, tuple))}
    if len(lengths) > 1:
        raise ValueError(f"lists must have one length, got {sorted(lengths)}")
    length = max(lengths, default=1)
    rows = []
    for value in values:
        is_list = isinstance(value, (list, tuple))
        rows.append(list(value) if is_list else [value] * length)
    return rows, bool(lengths)


def _value_of(answer: Verdict | Answer) -> Any:
    """P(Yes) or text. None, with a line in the log, if there is none."""
    value, error = astuple(answer)
    if error is not None:
        logger.warning("no answer: %s", error)
    return value
