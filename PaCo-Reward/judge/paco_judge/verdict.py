"""P(Yes) from what a model says: score = P(Yes) / (P(Yes) + P(No)) at the first answer token (arXiv 2512.04784).

A missing score is ``None`` with a cause, never a number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

YES, NO = "Yes", "No"


@dataclass(frozen=True)
class Verdict:
    """The judge's answer on one pair: a probability in [0, 1], or an error with its cause; exactly one is set."""

    p_yes: float | None
    error: str | None = None

    def __post_init__(self):
        if (self.p_yes is None) == (self.error is None):
            raise ValueError(f"a verdict has a probability or an error, got p_yes={self.p_yes}, error={self.error!r}")
        if self.p_yes is not None and not 0.0 <= self.p_yes <= 1.0:
            raise ValueError(f"p_yes must lie in [0, 1], got {self.p_yes}")

    @property
    def ok(self) -> bool:
        """True when there is a probability."""
        return self.error is None


def is_yes(token: str, variants: bool = False) -> bool:
    """Whether a token says Yes: exactly ``Yes``, or with ``variants`` in any case and with surrounding space."""
    return token == YES or (variants and token.strip().casefold() == "yes")


def is_no(token: str, variants: bool = False) -> bool:
    """Whether a token says No: exactly ``No``, or with ``variants`` in any case and with surrounding space."""
    return token == NO or (variants and token.strip().casefold() == "no")


def p_yes_from_top_logprobs(
    top: Mapping[str, float] | Iterable[Mapping[str, object]], variants: bool = False
) -> float | None:
    """P(Yes) / (P(Yes) + P(No)) from the top log-probabilities of the first answer token.

    ``top``: ``{token: logprob}``, or OpenAI's list of ``{"token": …, "logprob": …}``. With ``variants`` the
    probabilities of all spellings are summed. An answer that is not among the top counts as probability 0;
    None if neither is there. Raises ValueError for a log-probability that is not a number.
    """
    entries = top.items() if isinstance(top, Mapping) else [(entry["token"], entry["logprob"]) for entry in top]
    yes: list[float] = []
    no: list[float] = []
    for token, logprob in entries:
        if is_yes(token, variants):
            yes.append(float(logprob))
        elif is_no(token, variants):
            no.append(float(logprob))
    return _share(_log_sum(yes), _log_sum(no))


def p_yes_from_logits(
    logits: ArrayLike, yes_ids: int | Sequence[int], no_ids: int | Sequence[int], top: int | None = None
) -> np.ndarray:
    """P(Yes) / (P(Yes) + P(No)) from logits of shape (..., V), computed in float64; result of shape (...).

    ``yes_ids``/``no_ids``: the token ids whose probabilities are summed. With ``top`` only ids among the ``top``
    largest logits count (what a server with ``top_logprobs=top`` reports); NaN where neither is among them.
    Raises ValueError for logits that are NaN or an id outside the vocabulary.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if np.isnan(logits).any():
        raise ValueError("the logits contain NaN: the model's forward went wrong")
    yes, no = (np.atleast_1d(np.asarray(ids, dtype=np.int64)) for ids in (yes_ids, no_ids))
    size = logits.shape[-1]
    if min(yes.min(), no.min()) < 0 or max(yes.max(), no.max()) >= size:
        raise ValueError(f"token ids {yes.tolist()} / {no.tolist()} are outside the vocabulary of {size}")
    if top is not None and top < size:
        kept = np.argsort(-logits, axis=-1, kind="stable")[..., :top]
        mask = np.full(logits.shape, -np.inf)
        np.put_along_axis(mask, kept, 0.0, axis=-1)
        logits = logits + mask
    with np.errstate(invalid="ignore"):  # −inf − (−inf): neither answer is there, NaN is the result that is meant
        difference = np.logaddexp.reduce(logits[..., no], axis=-1) - np.logaddexp.reduce(logits[..., yes], axis=-1)
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(difference))


def mean_over_dimensions(scores: Mapping[str, Sequence[float | None]]) -> float | None:
    """Mean within each dimension, then over dimensions; None if one score is missing.

    Raises ValueError for an empty mapping or an empty dimension.
    """
    if not scores or any(len(values) == 0 for values in scores.values()):
        raise ValueError("there is nothing to average: each dimension needs at least one score")
    if any(value is None for values in scores.values() for value in values):
        return None
    return float(np.mean([np.mean(values) for values in scores.values()]))


def mean_score(verdicts: Sequence[Verdict]) -> float | None:
    """``consistency_score`` of one image: the mean over its pairs; None if a pair has no score or there is none."""
    if not verdicts or any(verdict.p_yes is None for verdict in verdicts):
        return None
    return float(np.mean([verdict.p_yes for verdict in verdicts]))


def editing_score(consistency: Verdict, instruction: Verdict) -> float | None:
    """``consistency_for_editing`` of one edit: sqrt(q1 · q2); None if one of the two is missing."""
    if consistency.p_yes is None or instruction.p_yes is None:
        return None
    return math.sqrt(consistency.p_yes * instruction.p_yes)


def _log_sum(logprobs: list[float]) -> float:
    """log Σ exp; −inf for none."""
    if any(math.isnan(value) or value == math.inf for value in logprobs):
        raise ValueError(f"log-probabilities {logprobs} are not numbers")
    highest = max(logprobs, default=-math.inf)
    if highest == -math.inf or len(logprobs) == 1:
        return highest
    return highest + math.log(sum(math.exp(value - highest) for value in logprobs))


def _share(yes: float, no: float) -> float | None:
    """exp(yes) / (exp(yes) + exp(no)) without overflow; None when both are −inf."""
    if yes == no == -math.inf:
        return None
    difference = no - yes
    if difference > 0:
        odds = math.exp(-difference)
        return odds / (1.0 + odds)
    return 1.0 / (1.0 + math.exp(difference))
