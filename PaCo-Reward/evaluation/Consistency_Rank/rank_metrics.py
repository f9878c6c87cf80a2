"""Metrics of one ranked item, as ConsistencyRank defines them (arXiv 2512.04784).

Ties: candidates with the same score keep their listed order in the predicted order, and the tied pairs are counted.
Kendall's tau-b and Spearman's rho are taken on the scores themselves, where ties count as ties (average ranks); when
every score is the same the correlation does not exist and is reported as 0, as a judge that orders nothing deserves.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy.stats import kendalltau, spearmanr

METRICS = (
    *("accuracy", "kendalltau", "spearmanr", "footrule", "top1", "bottom1", "top_bottom_mean"),
    *("kendalltau_published", "spearmanr_published"),
)


def predicted_order(scores: Sequence[float]) -> list[int]:
    """Candidate indices, highest score first; ties in listed order."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def rank_metrics(scores: Sequence[float], true_order: Sequence[int]) -> dict[str, float]:
    """All metrics of one item.

    Args:
        scores: (n,) P(Yes) of each candidate against the reference, n >= 2, as listed in the item.
        true_order: (n,) the candidates' indices, best first (a permutation of 0 .. n-1).

    Returns:
        accuracy: share of positions that hold the right candidate. kendalltau (tau-b), spearmanr: between scores and
        true ranks, in [-1, 1]. footrule: sum over candidates of |predicted - true position|. top1, bottom1: the best
        and the worst found (0/1), and top_bottom_mean. kendalltau_published, spearmanr_published: between the two
        lists of candidate indices in predicted and in true order, the numbers of the paper's script. ties: pairs of
        candidates with equal scores.

    Raises:
        ValueError: fewer than two candidates, or lists that do not belong together.
    """
    n = len(scores)
    if n < 2:
        raise ValueError(f"a ranking needs at least two candidates, not {n}")
    if sorted(true_order) != list(range(n)):
        raise ValueError(f"the true order {list(true_order)} is no permutation of {n} candidates")
    order = predicted_order(scores)
    true_rank, predicted_rank = np.argsort(true_order), np.argsort(order)
    top1, bottom1 = float(order[0] == true_order[0]), float(order[-1] == true_order[-1])
    return {
        "accuracy": float(np.mean(np.array(order) == np.array(true_order))),
        "kendalltau": _correlation(kendalltau, scores, -true_rank),
        "spearmanr": _correlation(spearmanr, scores, -true_rank),
        "footrule": float(np.abs(predicted_rank - true_rank).sum()),
        "top1": top1,
        "bottom1": bottom1,
        "top_bottom_mean": (top1 + bottom1) / 2,
        "kendalltau_published": _correlation(kendalltau, order, true_order),
        "spearmanr_published": _correlation(spearmanr, order, true_order),
        "ties": float(sum(scores[i] == scores[j] for i, j in combinations(range(n), 2))),
    }


def _correlation(function, first: Sequence[float], second: Sequence[float]) -> float:
    if np.ptp(first) == 0:  # undefined; scipy would warn and return NaN
        return 0.0
    return float(function(first, second).statistic)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over items (without Bessel's correction)."""
    return float(np.mean(values)), float(np.std(values))
