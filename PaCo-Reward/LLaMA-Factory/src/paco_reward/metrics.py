"""What a judge is measured by: accuracy, AUC and calibration of P(Yes), in NumPy float64."""

from typing import Any

import numpy as np

# Columns of the per-answer statistics that evaluation gathers.
TOKEN_ACCURACY, FIRST_CORRECT, P_YES, LABEL = range(4)


def _checked(p_yes: Any, label: Any) -> tuple[np.ndarray, np.ndarray]:
    p_yes, label = np.asarray(p_yes, dtype=np.float64), np.asarray(label).astype(bool)
    if p_yes.shape != label.shape or p_yes.ndim != 1:
        raise ValueError(f"scores and labels must be two lists of one length, not {p_yes.shape} and {label.shape}")
    return p_yes, label


def pair_accuracy(p_yes: Any, label: Any) -> float:
    """Share of pairs with (P(Yes) > 0.5) == label; exactly 0.5 counts as No. NaN when there are none.

    Args:
        p_yes: (n,) float in [0, 1]. label: (n,) bool, True = Yes.
    """
    p_yes, label = _checked(p_yes, label)
    return float(np.mean((p_yes > 0.5) == label)) if len(p_yes) else float("nan")


def auc(p_yes: Any, label: Any) -> float:
    """Area under the ROC curve: the chance that a Yes pair scores above a No pair, ties counting one half.

    NaN when one of the two classes is absent. Shapes as in pair_accuracy.
    """
    p_yes, label = _checked(p_yes, label)
    positives, negatives = int(label.sum()), int((~label).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    # Mann-Whitney U from average ranks: below = scores smaller, upto = scores smaller or equal.
    ordered = np.sort(p_yes)
    below = np.searchsorted(ordered, p_yes, side="left")
    upto = np.searchsorted(ordered, p_yes, side="right")
    ranks = (below + upto + 1) / 2.0
    return float((ranks[label].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def expected_calibration_error(p_yes: Any, label: Any, bins: int = 10) -> float:
    """Mean over pairs of |mean P(Yes) - share of Yes| of the pair's bin (equal-width bins on [0, 1]).

    Guo et al., arXiv 1706.04599, eq. 3, for the binary score P(Yes). NaN when there are no pairs.
    """
    p_yes, label = _checked(p_yes, label)
    if not len(p_yes):
        return float("nan")
    index = np.minimum((p_yes * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, weights=p_yes - label, minlength=bins)
    return float(np.abs(gaps).sum() / len(p_yes))


def judge_report(p_yes: Any, label: Any) -> dict[str, float]:
    """accuracy, auc, ece of the scored pairs and how many they are (n). Missing scores (NaN) are left out."""
    p_yes, label = _checked(p_yes, label)
    scored = ~np.isnan(p_yes)
    p_yes, label = p_yes[scored], label[scored]
    return {
        "accuracy": pair_accuracy(p_yes, label),
        "auc": auc(p_yes, label),
        "ece": expected_calibration_error(p_yes, label),
        "n": int(scored.sum()),
    }


class JudgeMetrics:
    """`compute_metrics` of the trainer: aggregates the rows of `paco_reward.overlay.answer_statistics`.

    Returns accuracy (LLaMA-Factory's own: share of answer tokens right, averaged over examples),
    first_token_accuracy, and over the examples whose answer begins with Yes or No: judge_accuracy, judge_auc,
    judge_ece. Works with `batch_eval_metrics` too.
    """

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def __call__(self, predictions: Any, compute_result: bool = True) -> dict[str, float] | None:
        rows = predictions.predictions
        self.rows.append(np.asarray(rows.cpu() if hasattr(rows, "cpu") else rows, dtype=np.float64))
        if not compute_result:
            return None
        rows, self.rows = np.concatenate(self.rows), []
        judged = rows[~np.isnan(rows[:, LABEL])]
        report = judge_report(judged[:, P_YES], judged[:, LABEL] > 0.5)
        result = {
            "accuracy": float(np.nanmean(rows[:, TOKEN_ACCURACY])),
            "first_token_accuracy": float(np.nanmean(rows[:, FIRST_CORRECT])),
            "judge_accuracy": report["accuracy"],
            "judge_auc": report["auc"],
            "judge_ece": report["ece"],
        }
        return {name: value for name, value in result.items() if not np.isnan(value)}
