"""The numbers of an epoch or evaluation by ``group/name``, and their lines in the log."""

import math
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np


def epoch_metrics(
    rewards: Mapping[str, np.ndarray],
    advantage_stats: Mapping[str, float],
    losses: Mapping[str, float],
    times: Mapping[str, float],
    health: Mapping[str, float],
    memory: bool,
) -> dict[str, float]:
    """The numbers of an epoch by ``group/name``.

    It has mean, std and cv = std / |mean| of each reward (NaN = missing). Undefined values are left
    out, such as a cv where the mean is 0. Values that are not finite stay, for ``health`` to judge.
    """
    metrics: dict[str, float] = {}
    for name, value in losses.items():
        metrics[f"train/{name}"] = float(value)
    for name, values in rewards.items():
        present = values[~np.isnan(values)]
        if len(present):
            mean = float(present.mean())
            std = float(present.std())
            metrics[f"reward/{name}_mean"] = mean
            metrics[f"reward/{name}_std"] = std
            if mean:
                metrics[f"reward/{name}_cv"] = std / abs(mean)
    for name, value in advantage_stats.items():
        group = "reward" if name == "missing_share" else "advantage"
        metrics[f"{group}/{name}"] = float(value)
    for name, seconds in times.items():
        metrics[f"time/{name}_s"] = seconds
    metrics |= health
    if memory:
        import torch  # here, so that what only reads runs does not wait for it

        metrics["memory/peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if torch.cuda.is_available():
            metrics["memory/peak_cuda_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return metrics


def epoch_line(metrics: Mapping[str, float]) -> str:
    """The log line of an epoch: rewards, gradient norm, seconds."""
    rewards = rewards_line(metrics, "reward/")
    norm = metrics.get("train/grad_norm", math.nan)
    seconds = metrics["time/epoch_s"]
    phases = ("sample", "reward_wait", "train")
    times = ", ".join(f"{name} {metrics[f'time/{name}_s']:.1f}" for name in phases)
    return f"{rewards}; gradient norm {norm:.3g}; {seconds:.1f} s ({times})"


def rewards_line(metrics: Mapping[str, float], group: str) -> str:
    """``means`` in one line, with ± the standard error where it is known."""
    parts = []
    for name, value in means(metrics, group).items():
        parts.append(f"{name} {value:.4f}")
        if (error := metrics.get(f"{group}{name}_stderr")) is not None:
            parts[-1] += f" ± {error:.4f}"
    return ", ".join(parts)


def means(metrics: Mapping[str, float], group: str) -> dict[str, float]:
    """Name → value of the entries ``<group><name>_mean``."""
    values = {}
    for key, value in metrics.items():
        if key.startswith(group) and key.endswith("_mean"):
            values[key.removeprefix(group).removesuffix("_mean")] = value
    return values


# --- evaluations ----------------------------------------------------------------------------------


def evaluation_metrics(
    scores: np.ndarray,
    missing: np.ndarray,
    names: Sequence[str],
    categories: Sequence[object],
) -> dict[str, float]:
    """The numbers of an evaluation from ``scores`` (images, rewards), NaN where there is none.

    Returns:
        ``eval/num_images``, ``eval/missing_share`` (images that lack a score), for each reward
        ``eval/<name>_mean``, ``_stderr`` (ddof 1) over images that have the score, and ``_missing``
        (share of the images, if any lack it), and ``category/<category>/<name>_mean``.
    """
    metrics: dict[str, float] = {
        "eval/num_images": len(scores),
        "eval/missing_share": float(missing.any(axis=1).mean()),
    }
    for key, value in summarize(scores, names, missing).items():
        metrics[f"eval/{key}"] = value
    for category in sorted({*categories} - {None}, key=str):
        in_category = np.array(categories, object) == category
        for key, value in summarize(scores[in_category], names).items():
            if key.endswith("_mean"):
                metrics[f"category/{category}/{key}"] = value
    return metrics


def set_metrics(
    scores: np.ndarray,
    names: Sequence[str],
    datasets: np.ndarray,
    groups: Sequence[str],
    missing: np.ndarray | None = None,
) -> dict[str, float]:
    """``set/<name of the set>/<reward>_mean`` and ``_stderr``, and ``_missing`` as in evaluations.

    Args:
        scores: (images, rewards), NaN = missing or absent.
        names: Of the rewards.
        datasets: (images,), number of each image's prompt set.
        groups: What the names of each set's metrics begin with, by its number.
        missing: (images, rewards), which of ``scores`` are missing; None: no ``_missing``.
    """
    metrics = {}
    for number, group in enumerate(groups):
        members = datasets == number
        missing_here = None if missing is None else missing[members]
        for key, value in summarize(scores[members], names, missing_here).items():
            metrics[f"{group}{key}"] = value
    return metrics


def summarize(
    scores: np.ndarray, names: Sequence[str], missing: np.ndarray | None = None
) -> dict[str, float]:
    """``NAME_mean`` and ``NAME_stderr`` of ``scores`` (images, names), over those that are not NaN.

    If ``missing`` (images, names) marks an image under a name, ``NAME_missing`` is the share of
    such images.
    """
    summary = {}
    for column, name in enumerate(names):
        if missing is not None and missing[:, column].any():
            summary[f"{name}_missing"] = float(missing[:, column].mean())
        values = scores[:, column]
        values = values[~np.isnan(values)]
        if len(values):
            summary[f"{name}_mean"] = float(values.mean())
        if len(values) > 1:
            summary[f"{name}_stderr"] = float(values.std(ddof=1) / math.sqrt(len(values)))
    return summary


# --- w and b --------------------------------------------------------------------------------------

# For a prompt with several images, w is the mean P(Yes) over pairs of panels of one image
# (``consistency_score``), and b the mean P(Yes) over pairs of panels of different images of the
# same *open* prompt (1 − ``between_images``). w − b is the "differential identifiability" of Amico
# and Goñi (2018, arXiv:1707.02365): similarity within minus similarity between. It rises with
# agreement and falls when all images become the same (docs/rewards.md).


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of rewards among ``names`` that measure w and b.

    ``consistency_score`` belongs to ``between_images``, and ``X_consistency`` or
    ``X_consistency_score`` to ``X_between_images``.
    """
    names = set(names)
    suffix = "between_images"
    prefixes = sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))
    pairs = []
    for prefix in prefixes:
        for within in (f"{prefix}consistency_score", f"{prefix}consistency"):
            if within in names:
                pairs.append((within, f"{prefix}{suffix}"))
    return pairs


def by_prompt(scores: np.ndarray, item_ids: np.ndarray, mean: Callable = np.mean) -> np.ndarray:
    """Means of each prompt's images (prompts, rewards), prompts in order of their ids.

    Args:
        scores: (images, rewards), NaN = missing. With ``np.mean`` its prompt's mean is missing,
            too.
        item_ids: (images,)
    """
    means = [mean(scores[item_ids == item_id], axis=0) for item_id in np.unique(item_ids)]
    return np.array(means).reshape(-1, scores.shape[1])


def within_between(
    scores: np.ndarray, item_ids: np.ndarray, is_open: np.ndarray
) -> dict[str, np.ndarray]:
    """w, b and w − b of each open prompt, (prompts,) in order of their ids.

    Means over its images that have the score; NaN without any.

    Args:
        scores: (images, 2), of the rewards that measure w and 1 − b; NaN = missing.
        item_ids: (images,)
        is_open: (images,) bool
    """
    means = by_prompt(scores[is_open], item_ids[is_open], _mean_of_present)
    within = means[:, 0]
    between = 1 - means[:, 1]
    return {"within": within, "between": between, "within_minus_between": within - between}


def _mean_of_present(values: np.ndarray, axis: int) -> np.ndarray:
    """As ``np.nanmean``, but without a warning where all values are missing."""
    return np.ma.masked_invalid(values).mean(axis).filled(np.nan)


def of_epoch(
    scores: Mapping[str, np.ndarray], item_ids: np.ndarray, is_open: Sequence[bool]
) -> dict[str, float]:
    """``reward/within``, ``reward/between`` and their difference of a training epoch.

    Means over its open prompts; {} without two rewards that measure them, or without such prompts.

    Args:
        scores: Short name → (samples,), NaN = missing.
        item_ids: (samples,)
        is_open: By item id.
    """
    pairs = pairs_of(scores)
    if not pairs:
        return {}
    columns = np.column_stack([scores[name] for name in pairs[0]])
    measured = within_between(columns, item_ids, np.array(is_open)[item_ids])
    has_both = ~np.isnan(measured["within_minus_between"])
    if not has_both.any():
        return {}
    metrics = {}
    for name, values in measured.items():
        metrics[f"reward/{name}"] = float(values[has_both].mean())
    return metrics
