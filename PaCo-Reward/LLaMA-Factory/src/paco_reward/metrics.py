"""Measures of a judge: accuracy, AUC and calibration of P(Yes), in NumPy float64.

``measure`` is of a scorer on labeled pairs. ``answer_statistics`` and ``judge_metrics`` are of a
training's evaluation: the first reduces the logits of a batch, the second all answers of the first.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import mannwhitneyu

from paco_judge.questions import Pair
from paco_judge.verdict import log_softmax, top_logprobs, verdict_from_top_logprobs
from paco_reward.loss import find_answers

logger = logging.getLogger(__name__)


def auc(p_yes: Any, label: Any) -> float | None:
    """Area under the ROC curve: the chance that a Yes pair scores above a No pair, ties count ½.

    ``p_yes`` and ``label`` (True = Yes) are (n,). None when one of the two classes is absent.
    """
    p_yes = np.asarray(p_yes, dtype=np.float64)
    label = np.asarray(label, dtype=bool)
    if label.all() or not label.any():
        return None
    ordered = mannwhitneyu(p_yes[label], p_yes[~label], method="asymptotic").statistic
    num_comparisons = label.sum() * (~label).sum()
    return float(ordered / num_comparisons)


def expected_calibration_error(p_yes: Any, label: Any, bins: int = 10) -> float:
    """Mean over pairs of |mean P(Yes) - share of Yes| of their bins (arXiv 1706.04599, eq. 3)."""
    p_yes = np.asarray(p_yes, dtype=np.float64)
    label = np.asarray(label, dtype=bool)
    index = np.minimum((p_yes * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, weights=p_yes - label, minlength=bins)
    return float(np.abs(gaps).sum() / len(p_yes))


def judge_report(p_yes: Any, label: Any) -> dict[str, float | None]:
    """accuracy ((P(Yes) > 0.5) == label), auc, ece and the number n of the pairs with a score.

    A NaN is no score. Without any score, the three measures are None.
    """
    p_yes = np.asarray(p_yes, dtype=np.float64)
    is_scored = ~np.isnan(p_yes)
    p_yes = p_yes[is_scored]
    label = np.asarray(label, dtype=bool)[is_scored]
    if len(p_yes) == 0:
        return {"accuracy": None, "auc": None, "ece": None, "n": 0}
    return {
        "accuracy": float(np.mean((p_yes > 0.5) == label)),
        "auc": auc(p_yes, label),
        "ece": expected_calibration_error(p_yes, label),
        "n": len(p_yes),
    }


def measure(
    scorer: Any, pairs: Sequence[Pair], labels: list[bool], kinds: Sequence[str] = ()
) -> dict[str, Any]:
    """``judge_report`` of a ``JudgeScorer`` on labeled pairs, and how many are ``missing``.

    ``kinds``: each pair's kind; with several kinds, the result's ``kinds`` has a report of each.
    """
    verdicts = scorer.score(pairs)
    scores = np.array([verdict.p_yes for verdict in verdicts], dtype=np.float64)  # None becomes NaN
    errors = [verdict.error for verdict in verdicts if not verdict.ok]
    if errors:
        logger.warning("%d pairs have no score, first: %s", len(errors), errors[0])
    report = judge_report(scores, labels) | {"missing": len(errors)}
    if len(set(kinds)) > 1:
        report["kinds"] = {}
        for kind in dict.fromkeys(kinds):
            is_kind = np.array(kinds) == kind
            report["kinds"][kind] = judge_report(scores[is_kind], np.array(labels)[is_kind])
    return report


def comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Two judges' ``measure`` on the same data sets, as Markdown: a row for each data set."""
    rows = [["data set", "pairs", "accuracy before", "after", "AUC before", "after"], ["---"] * 6]
    for name, now in (after.get("kinds") or {after["dataset"]: after}).items():
        earlier = (before.get("kinds") or {name: before})[name]
        cells = [name, str(now["n"])]
        for measured in ("accuracy", "auc"):
            for report in (earlier, now):
                value = report[measured]
                cells.append("–" if value is None else f"{value:.3f}")
        rows.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


class AnswerStatistics(NamedTuple):
    """The columns of ``answer_statistics``, of one answer or of all answers."""

    token_accuracy: Any  # share of the answer's tokens that are right
    first_token_correct: Any  # 1 or 0
    p_yes: Any  # at the first token of the answer; NaN: no score
    is_yes: Any  # the label there: 1 Yes, 0 No, NaN another token


def answer_statistics(logits: Any, labels: torch.Tensor, yes_id: int, no_id: int) -> torch.Tensor:
    """``AnswerStatistics`` of the answers of one evaluation batch, (B, A, 4) float32.

    A row has as many answers as it has turns or, packed, pairs; A is the most of them, at least 1.
    NaN stands where a row has fewer.

    Args:
        logits: (K, V) of the labeled tokens (our loss); (B, L, V) of all positions (LLaMA-Factory's
            own losses); or a tuple that begins with one of the two.
        labels: (B, L) int64, -100 = ignored.
        yes_id: Token of Yes.
        no_id: Token of No.
    """
    if isinstance(logits, (list, tuple)):
        logits = logits[0]
    answers = find_answers(labels)
    if logits.dim() == 3:
        logits = logits[:, :-1][answers.mask]
    is_correct = (logits.argmax(-1) == answers.tokens).float()
    row_of_token = answers.mask.nonzero()[:, 0]
    rows = row_of_token[answers.is_first].tolist()
    left = Counter(rows)  # places of each row that are not filled yet
    shape = (len(labels), max(left.values(), default=1), 4)
    statistics = torch.full(shape, torch.nan, device=logits.device)
    words = {yes_id: "Yes", no_id: "No"}
    start = 0
    for row, length in zip(rows, answers.lengths.tolist(), strict=True):
        logprobs = log_softmax(logits[start].float().cpu().numpy())
        top = top_logprobs(logprobs, lambda number: words.get(number, "another"))
        p_yes = verdict_from_top_logprobs(top).p_yes
        is_yes = {yes_id: 1.0, no_id: 0.0}.get(int(answers.tokens[start]), torch.nan)
        columns = AnswerStatistics(
            token_accuracy=is_correct[start : start + length].mean(),
            first_token_correct=is_correct[start],
            p_yes=torch.tensor(torch.nan if p_yes is None else p_yes, device=logits.device),
            is_yes=torch.tensor(is_yes, device=logits.device),
        )
        left[row] -= 1
        statistics[row, left[row]] = torch.stack(columns)
        start += length
    return statistics


def judge_metrics(predictions: Any) -> dict[str, float]:
    """``compute_metrics`` of the trainer, from the ``answer_statistics`` of all batches.

    accuracy is LLaMA-Factory's: the share of answer tokens that are right, averaged over answers.
    The judge's numbers are over the answers that begin with Yes or No and have a score;
    judge_missing is how many have none.
    """
    table = np.asarray(predictions.predictions, dtype=np.float64).reshape(-1, 4)
    table = table[table[:, 0] >= 0]  # neither NaN nor -100, with which the trainer fills up
    columns = AnswerStatistics(*table.T)
    is_judged = ~np.isnan(columns.is_yes)
    report = judge_report(columns.p_yes[is_judged], columns.is_yes[is_judged] > 0.5)
    result = {
        "accuracy": float(np.mean(columns.token_accuracy)),
        "first_token_accuracy": float(np.mean(columns.first_token_correct)),
        "judge_missing": int(is_judged.sum()) - report["n"],
    }
    for name in ("accuracy", "auc", "ece"):
        if report[name] is not None:
            result[f"judge_{name}"] = report[name]
    return result
