"""P(Yes) from a model's answer (arXiv 2512.04784).

score = P(Yes) / (P(Yes) + P(No)) at the first answer token.
A missing score is ``None`` with a cause, never a number.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
LOWEST = -9999.0  # stands for minus infinity, which is no JSON; vLLM's value
_ROUNDING = 1e-3  # by which a log-probability may exceed 0
_MOST_TOTAL = 1.01  # of all listed probabilities, rounded
_RAW = "they are logits or otherwise changed: start vLLM without --logprobs-mode"


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


def log_softmax(logits: ArrayLike) -> np.ndarray:
    """Log-probabilities from logits (V,), in float64; all NaN if a logit is NaN or +infinity."""
    logits = np.asarray(logits, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())


def top_logprobs(
    logprobs: np.ndarray, token_of: Callable[[int], str], count: int = TOP_LOGPROBS
) -> list[dict[str, Any]]:
    """OpenAI's ``top_logprobs`` of one token, most probable first, from log-probabilities (V,).

    ``token_of``: the text of a token id.
    """
    likeliest = np.argpartition(-logprobs, min(count, len(logprobs) - 1))[:count]
    likeliest = likeliest[np.argsort(-logprobs[likeliest])]
    return [entry(token_of(number), logprobs[number]) for number in likeliest.tolist()]


def entry(token: str, logprob: float) -> dict[str, Any]:
    """One of OpenAI's ``top_logprobs``; NaN stays."""
    return {"token": token, "logprob": max(float(logprob), LOWEST)}


def read_logprobs(top: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Token and log-probability of each entry of ``top_logprobs``.

    A token may be there twice: many incomplete characters have the same text.

    Raises:
        ValueError: They are no log-probabilities.
    """
    entries = [(row["token"], row["logprob"]) for row in top]
    for token, logprob in entries:
        if math.isnan(logprob):
            raise ValueError(
                f"the log-probability of {token!r} is not a number: the model's weights are damaged"
            )
        if logprob > _ROUNDING:
            raise ValueError(f"the log-probability of {token!r} is {logprob}, above 0; {_RAW}")
    total = sum(math.exp(logprob) for _, logprob in entries)
    if total > _MOST_TOTAL:
        raise ValueError(
            f"the probabilities of {len(entries)} tokens add up to {total:.3f}, above 1; {_RAW}"
        )
    return entries


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
        ValueError: Yes or No is missing from fewer than ``asked``, or the list cannot be: see
            ``read_logprobs``, or a counted word is there twice, or is minus infinity.
    """
    entries = read_logprobs(top)
    yes_tokens, no_tokens = ANSWER_TOKENS[answer_tokens]
    counted: dict[str, float] = {}
    for token, logprob in entries:
        if token not in (*yes_tokens, *no_tokens):
            continue
        if token in counted:
            raise ValueError(f"{token!r} is listed twice, so its probability is not known")
        if not math.isfinite(logprob):
            raise ValueError(f"the log-probability of {token!r} is not finite")
        counted[token] = logprob
    yes = _log_sum([logprob for token, logprob in counted.items() if token in yes_tokens])
    no = _log_sum([logprob for token, logprob in counted.items() if token in no_tokens])
    if yes == no == -np.inf:
        return None
    if -np.inf in (yes, no) and len(entries) < asked:
        raise ValueError(
            f"only {len(entries)} of {asked} log-probabilities came back, and Yes or No is not "
            "among them"
        )
    with np.errstate(over="ignore"):
        return float(1.0 / (1.0 + np.exp(no - yes)))


def _log_sum(logprobs: Sequence[float]) -> float:
    """Logarithm of the summed probabilities; minus infinity if there is none."""
    possible = [logprob for logprob in logprobs if logprob > LOWEST]
    return np.logaddexp.reduce(possible, initial=-np.inf)


def verdict_from_top_logprobs(
    top: Sequence[Mapping[str, Any]], answer_tokens: str = "exact", asked: int = TOP_LOGPROBS
) -> Verdict:
    """``p_yes_from_top_logprobs``, or why there is no score; so for every judge."""
    try:
        p_yes = p_yes_from_top_logprobs(top, answer_tokens, asked)
    except ValueError as error:
        return Verdict(None, str(error))
    if p_yes is None:
        shown = [row["token"] for row in top[:5]]
        return Verdict(
            None, f"neither Yes nor No is among the judge's top {len(top)} tokens ({shown}, …)"
        )
    return Verdict(p_yes)


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
