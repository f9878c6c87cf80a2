"""What a run logs: rows of metrics, and one line for each epoch and evaluation."""

import math
import resource
from collections.abc import Mapping

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

    Of rewards (NaN = missing): mean, std and cv = std / |mean|. What has no meaning is left out (a
    cv where the mean is 0). What is not finite stays, for ``health`` to judge.
    """
    metrics = {f"train/{name}": value for name, value in losses.items()}
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
        metrics[f"{group}/{name}"] = value
    metrics |= {f"time/{name}_s": value for name, value in times.items()}
    metrics |= health
    if memory:
        import torch  # here, so that what only reads runs does not wait for it

        metrics["memory/peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if torch.cuda.is_available():
            metrics["memory/peak_cuda_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return {name: float(value) for name, value in metrics.items()}


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
