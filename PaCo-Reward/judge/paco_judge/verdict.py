"""P(Yes) from a model's answer (arXiv 2512.04784).

score = P(Yes) / (P(Yes) + P(No)) at the first answer token.
A missing score is ``None`` with a cause, never a number.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def _variants(*words: str) -> tuple[str, ...]:
    """Words in lower case, capitalized and in capitals, with and without a space before them."""
    forms: list[str] = []
    for word in words:
        forms += [word, word.capitalize(), word.upper()]
    return (*forms, *(f" {form}" for form in forms))


# Option ``answer_tokens``: the tokens that count as Yes and as No.
ANSWER_TOKENS = {
    "exact": (("Yes",), ("No",)),
    "variants": (_variants("yes", "y"), _variants("no", "n")),
}
# Servers give so many. No more count in this process, so that the same pairs have a score.
TOP_LOGPROBS = 20
_VLLM_MINUS_INFINITY = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Verdict:
    """The judge's answer on one pair: a probability in [0, 1] or an error."""

    p_yes: float | None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a probability."""
        return self.error is None


@dataclass(frozen=True)
class Answer:
    """A model's whole answer to one pair: a text or an error."""

    text: str | None
    error: str | None = None


def verdict_of(answer: str) -> bool | None:
    """Whether an answer begins with the word Yes (True) or No (False); None: with neither.

    The judge is trained and asked for exactly these words, so "yes", " Yes", "Not sure", "Nothing",
    "No-one" and "Yesterday" are neither.
    """
    word = re.match(r"(Yes|No)(?![\w'’-])", answer)
    return None if word is None else word[0] == "Yes"


def p_yes_from_top_logprobs(
    top: Iterable[Mapping[str, Any]],
    answer_tokens: str = "exact",
    asked: int = TOP_LOGPROBS,
) -> float | None:
    """The score from the top log-probabilities of the first answer token.

    Args:
        top: OpenAI's list of ``{"token": …, "logprob": …}``.
        answer_tokens: A key of ``ANSWER_TOKENS``; the probabilities of its tokens are summed.
        asked: The number of log-probabilities that were asked for. A word that is not among so
            many has probability 0.

    Returns:
        None if neither Yes nor No has a probability.

    Raises:
        ValueError: Yes or No is missing from fewer than ``asked``.
    """
    entries = [(entry["token"], entry["logprob"]) for entry in top]
    yes_tokens, no_tokens = ANSWER_TOKENS[answer_tokens]
    yes = _log_sum(entries, yes_tokens)
    no = _log_sum(entries, no_tokens)
    if yes == no == -np.inf:
        return None
    if -np.inf in (yes, no) and len(entries) < asked:
        raise ValueError(
            f"only {len(entries)} of {asked} log-probabilities came back, and Yes or No is not "
            "among them"
        )
    return float(_share(yes, no))


def _log_sum(entries: Sequence[tuple[str, float]], tokens: Collection[str]) -> float:
    """Logarithm of the summed probabilities of ``tokens``; minus infinity if there is none."""
    counted = []
    for token, logprob in entries:
        if token in tokens and logprob > _VLLM_MINUS_INFINITY:
            counted.append(logprob)
    return np.logaddexp.reduce(counted, initial=-np.inf)


def p_yes_from_logits(
    logits: ArrayLike,
    yes_ids: int | Sequence[int],
    no_ids: int | Sequence[int],
    top: int | None = None,
) -> np.ndarray:
    """The score from logits (..., V), of shape (...), in float64.

    The probabilities of the ids are summed.
    ``top``: as with a server's ``top_logprobs``, only so many of the largest logits count. NaN
    where neither Yes nor No is among them.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if top is not None and top < logits.shape[-1]:
        least = np.partition(logits, -top, axis=-1)[..., -top, None]
        logits = np.where(logits >= least, logits, -np.inf)
    with np.errstate(invalid="ignore"):
        yes = np.logaddexp.reduce(logits[..., np.atleast_1d(yes_ids)], axis=-1)
        no = np.logaddexp.reduce(logits[..., np.atleast_1d(no_ids)], axis=-1)
    return _share(yes, no)


def _share(yes: ArrayLike, no: ArrayLike) -> np.ndarray:
    """P(Yes) of two log-probabilities; NaN if both are minus infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        return 1.0 / (1.0 + np.exp(no - yes))


def mean_over_dimensions(scores: Mapping[str | None, Sequence[float | None]]) -> float | None:
    """Mean within each dimension, then over dimensions; None if a score is missing."""
    return _mean([_mean(values) for values in scores.values()])


def mean_score(verdicts: Sequence[Verdict]) -> float | None:
    """The score of an image, the mean over its pairs.

    None if one has no score, or without pairs.
    """
    return _mean([verdict.p_yes for verdict in verdicts])


def _mean(values: Sequence[float | None]) -> float | None:
    if len(values) == 0 or None in values:
        return None
    return float(np.mean(values))


def editing_score(*answers: Verdict) -> float | None:
    """The score of an edit, the root of its two answers' product, or its only answer.

    None if one is missing.
    """
    if any(answer.p_yes is None for answer in answers):
        return None
    product = math.prod(answer.p_yes for answer in answers)
    return product if len(answers) == 1 else math.sqrt(product)
