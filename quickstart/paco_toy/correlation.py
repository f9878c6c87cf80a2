"""Do rewards rank small images as they rank large ones? Base model, 32, 64 and 128 px.

Images of different sizes have the same prompts, seeds, steps and initial noise (``SameNoise``).
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats
import torch
from torch.nn.functional import avg_pool2d
from typing_extensions import override

from paco_grpo.policies.flux import FluxPolicy
from paco_judge.files import read_json_lines

RESOLUTIONS = (32, 64, 128)  # pixels
PROMPTS = 48  # half of them open
IMAGES_PER_PROMPT = 8
JUDGED = ("consistency_score", "between_images")
ORACLE = ("oracle_consistency", "oracle_between_images")
# Trained by the configurations toy_t2is…: c·(1 − b)^8
VARIETY_WEIGHT = 8
TRAINED = "c·(1 − b)^8"


class SameNoise(FluxPolicy):
    """The toy FLUX, with initial noise that looks alike in all ``RESOLUTIONS``.

    It is drawn for the largest size. Smaller ones have its averages over squares, times the side of
    a square, which keeps the variance 1.
    """

    @override
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        largest = max(RESOLUTIONS)
        noise = self._unpack(super().initial_latents(seeds, largest, largest), largest, largest)
        side = largest // height
        return self._pack(side * avg_pool2d(noise, side))


def evaluation_arguments(prompts: str, resolution: int, seed: int, output: Path) -> list[str]:
    """Arguments of evaluate.py; ``prompts`` is the folder of the prompt set."""
    rewards = dict.fromkeys([*JUDGED, *(f"paco_toy.oracle:{name}" for name in ORACLE)], 1.0)
    return [
        "--config=config/grpo.py:toy_t2is",
        f"--config.dataset={prompts}",
        "--config.pretrained.policy=paco_toy.correlation:SameNoise",
        f"--config.test.resolution={resolution}",
        f"--config.test.seed={1000 + seed}",
        f"--config.test.reward_fn={json.dumps(rewards)}",
        f"--images_per_prompt={IMAGES_PER_PROMPT}",
        f"--output={output}",
    ]


def table(folders: Mapping[int, Sequence[Path]]) -> pd.DataFrame:
    """Correlations of the scores of two sizes, with 95 % intervals.

    The intervals are by bootstrap over prompts. ``within prompts`` compares images of one prompt:
    scores minus the prompt's mean.

    Args:
        folders: Of evaluations, by size in pixels. Those of different seeds are taken together.

    Returns:
        A row for each reward and pair of sizes. Rewards that compare images are of open prompts.
    """
    scores_of = {resolution: scores(of_size) for resolution, of_size in folders.items()}
    rows = []
    rewards = scores_of[min(RESOLUTIONS)]
    for reward, sizes in itertools.product(rewards, itertools.combinations(RESOLUTIONS, 2)):
        small, large = (scores_of[size][reward] for size in sizes)
        of_prompt = [values - values.mean(axis=1, keepdims=True) for values in (small, large)]
        rows.append(
            {
                "reward": reward,
                "sizes": "{} and {}".format(*sizes),
                "images": small.size,
                "Pearson": interval(scipy.stats.pearsonr, small, large),
                "Spearman": interval(scipy.stats.spearmanr, small, large),
                "Pearson within prompts": interval(scipy.stats.pearsonr, *of_prompt),
            }
        )
    return pd.DataFrame(rows)


def scores(folders: Sequence[Path]) -> dict[str, np.ndarray]:
    """Of one size: float64 (prompts, images of a prompt in all folders), by reward."""
    parts: dict[str, list[np.ndarray]] = {}
    for folder in folders:
        rows = pd.DataFrame(read_json_lines(folder / "eval_data.jsonl"))
        rewards = pd.DataFrame(rows["rewards"].tolist(), dtype=np.float64)
        rewards[TRAINED] = rewards[JUDGED[0]] * rewards[JUDGED[1]] ** VARIETY_WEIGHT
        for name, values in rewards.items():
            counted = rows["open"] if name.endswith("between_images") else rows["open"].notna()
            by_prompt = values[counted].groupby(rows["item_id"]).agg(list)
            parts.setdefault(name, []).append(np.array(by_prompt.tolist()))
    return {name: np.concatenate(arrays, axis=1) for name, arrays in parts.items()}


def interval(correlate: Callable, first: np.ndarray, second: np.ndarray) -> str:
    """A correlation of scores (prompts, images) with its interval over prompts."""

    def correlation(prompts: np.ndarray) -> float:
        return correlate(first[prompts].ravel(), second[prompts].ravel()).statistic

    numbers = np.arange(len(first))
    resampled = scipy.stats.bootstrap(
        (numbers,), correlation, vectorized=False, n_resamples=500, method="percentile", rng=0
    )
    low, high = resampled.confidence_interval
    return f"{correlation(numbers):.2f} [{low:.2f}, {high:.2f}]"
