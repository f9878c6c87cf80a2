"""P(Yes) from a model's answer: score = P(Yes) / (P(Yes) + P(No)) at the first answer token (arXiv 2512.04784).

A missing score is ``None`` with a cause, never a number.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

ANSWER_TOKENS = {  # option ``answer_tokens`` -> the tokens that count as Yes and as No
    "exact": (("Yes",), ("No",)),
    "variants": tuple(
        tuple(
            space + form
            for space in ("", " ")
            for word in words
            for form in (word, word.capitalize(), word.upper())
        )
        for words in (("yes", "y"), ("no", "n"))
    ),
}
TOP_LOGPROBS = (
    20  # servers give so many; no more count in this process, so that the same pairs have a score
)
_ROUNDING = 1e-3  # servers may report slightly more than 0


@dataclass(frozen=True)
class Verdict:
    """The judge's answer on one pair: a probability in [0, 1] or an error."""

    p_yes: float | None
    error: str | None = None

    def __post_init__(self):
        if self.p_yes is not None and not 0.0 <= self.p_yes <= 1.0:
            raise ValueError(f"p_yes must lie in [0, 1], got {self.p_yes}")

    @property
    def ok(self) -> bool:
        """Whether there is a probability."""
        return self.error is None


def p_yes_from_top_logprobs(
    top: Mapping[str, float] | Iterable[Mapping[str, object]], answer_tokens: str = "exact"
) -> float | None:
    """The score from the top log-probabilities of the first answer token.

    Args:
        top: ``{token: logprob}``, or OpenAI's list of ``{"token": …, "logprob": …}``.
        answer_tokens: A key of ``ANSWER_TOKENS``; the probabilities of its tokens are summed.

    Returns:
        None if neither Yes nor No is among the top; if one of them is not, its probability is 0.

    Raises:
        ValueError: A log-probability is no number, NaN, or more than 0.
    """
    entries = (
        top.items()
        if isinstance(top, Mapping)
        else [(entry["token"], entry["logprob"]) for entry in top]
    )
    answers = [
        [logprob for token, logprob in entries if token in words]
        for words in ANSWER_TOKENS[answer_tokens]
    ]
    for value in itertools.chain(*answers):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value <= _ROUNDING:
            raise ValueError(f"{value!r} is not a log-probability")
    p_yes = _share(*(np.logaddexp.reduce(logprobs, initial=-np.inf) for logprobs in answers))
    return None if np.isnan(p_yes) else float(p_yes)


def p_yes_from_logits(
    logits: ArrayLike,
    yes_ids: int | Sequence[int],
    no_ids: int | Sequence[int],
    top: int | None = None,
) -> np.ndarray:
    """The score from logits of shape (..., V), in float64, of shape (...); the ids' probabilities are summed.

    ``top``: as with a server's ``top_logprobs``, only so many of the largest logits count. NaN where neither Yes nor No
    is among them.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if top is not None and top < logits.shape[-1]:
        least = np.partition(logits, -top, axis=-1)[..., -top, None]
        logits = np.where(logits >= least, logits, -np.inf)
    with np.errstate(invalid="ignore"):
        return _share(
            *(
                np.logaddexp.reduce(logits[..., np.atleast_1d(ids)], axis=-1)
                for ids in (yes_ids, no_ids)
            )
        )


def _share(yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return 1.0 / (1.0 + np.exp(no - yes))


def mean_over_dimensions(scores: Mapping[str, Sequence[float | None]]) -> float | None:
    """Mean within each dimension, then over dimensions; None if a score is missing."""
    return _mean([_mean(values) for values in scores.values()])


def mean_score(verdicts: Sequence[Verdict]) -> float | None:
    """The score of an image, the mean over its pairs; None if one has no score, or without pairs."""
    return _mean([verdict.p_yes for verdict in verdicts])


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values or not len(values) else float(np.mean(values))


def editing_score(*answers: Verdict) -> float | None:
    """The score of an edit, the root of its two answers' product, or its only answer; None if one is missing."""
    if any(answer.p_yes is None for answer in answers):
        return None
    product = math.prod(answer.p_yes for answer in answers)
    return product if len(answers) == 1 else math.sqrt(product)
