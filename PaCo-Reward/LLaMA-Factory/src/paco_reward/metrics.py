"""Measures of a judge: accuracy, AUC and calibration of P(Yes), in NumPy float64."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from paco_judge.client import Pair

logger = logging.getLogger(__name__)


def auc(p_yes: Any, label: Any) -> float | None:
    """Area under the ROC curve: the chance that a Yes pair scores above a No pair, ties counting one half.

    ``p_yes`` and ``label`` (True = Yes) are (n,). None when one of the two classes is absent.
    """
    p_yes, label = np.asarray(p_yes, dtype=np.float64), np.asarray(label, dtype=bool)
    if label.all() or not label.any():
        return None
    return float(
        mannwhitneyu(p_yes[label], p_yes[~label], method="asymptotic").statistic
        / (label.sum() * (~label).sum())
    )


def expected_calibration_error(p_yes: Any, label: Any, bins: int = 10) -> float:
    """Mean over pairs of |mean P(Yes) - share of Yes| of the pair's bin (arXiv 1706.04599, eq. 3)."""
    p_yes, label = np.asarray(p_yes, dtype=np.float64), np.asarray(label, dtype=bool)
    index = np.minimum((p_yes * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, weights=p_yes - label, minlength=bins)
    return float(np.abs(gaps).sum() / len(p_yes))


def judge_report(p_yes: Any, label: Any) -> dict[str, float | None]:
    """accuracy ((P(Yes) > 0.5) == label), auc, ece and number n of the pairs with a score (not NaN); None: no such pairs."""
    p_yes, label = np.asarray(p_yes, dtype=np.float64), np.asarray(label, dtype=bool)
    scored = ~np.isnan(p_yes)
    p_yes, label = p_yes[scored], label[scored]
    if not len(p_yes):
        return {"accuracy": None, "auc": None, "ece": None, "n": 0}
    accuracy, ece = float(np.mean((p_yes > 0.5) == label)), expected_calibration_error(p_yes, label)
    return {"accuracy": accuracy, "auc": auc(p_yes, label), "ece": ece, "n": len(p_yes)}


def measure(
    scorer: Any, pairs: Sequence[Pair], labels: list[bool], kinds: Sequence[str] = ()
) -> dict[str, Any]:
    """``judge_report`` of a ``JudgeScorer`` on labeled pairs, and ``missing``, the number of pairs without a score.

    ``kinds``: each pair's kind; with more than one kind, the result's ``kinds`` has the report of each.
    """
    verdicts = scorer.score(pairs)
    scores = np.array([verdict.p_yes for verdict in verdicts], dtype=np.float64)  # None becomes NaN
    if errors := [verdict.error for verdict in verdicts if not verdict.ok]:
        logger.warning("%d pairs have no score, first: %s", len(errors), errors[0])
    report = judge_report(scores, labels) | {"missing": len(errors)}
    if len(set(kinds)) > 1:
        chosen = {kind: np.array(kinds) == kind for kind in kinds}
        report["kinds"] = {
            kind: judge_report(scores[own], np.array(labels)[own]) for kind, own in chosen.items()
        }
    return report


def judge_metrics(predictions: Any) -> dict[str, float]:
    """``compute_metrics`` of the trainer, from the rows of ``overlay.answer_statistics``.

    accuracy is LLaMA-Factory's: the share of answer tokens that are right, averaged over examples. The judge's numbers
    are over the examples whose answer begins with Yes or No.
    """
    token_accuracy, first_correct, p_yes, label = np.asarray(
        predictions.predictions, dtype=np.float64
    ).T
    judged = ~np.isnan(label)
    report = judge_report(p_yes[judged], label[judged] > 0.5)
    result = {
        "accuracy": float(np.nanmean(token_accuracy)),
        "first_token_accuracy": float(np.nanmean(first_correct)),
    }
    result |= {f"judge_{name}": report[name] for name in ("accuracy", "auc", "ece")}
    return {name: value for name, value in result.items() if value is not None}
