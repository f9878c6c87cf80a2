"""Benchmarks: prompts and rewards that measure their images, results over prompts, comparisons."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paco_grpo.evaluation.pictures import markdown_table
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.suggest import did_you_mean

# Name → prompt set as dataset/fetch.py writes it, its kind, the rewards that measure its images.
BENCHMARKS = {
    "t2is": ("dataset/public-t2is", "geneval", ("consistency_score", "subfig_clipT", "pickscore")),
    "gedit": ("dataset/public-gedit", "geneval_image", ("consistency_for_editing",)),
}
_RESAMPLES = 10_000  # of the bootstrap
_BLOCK = 2_000_000  # prompts drawn at a time, 16 MB


def options_for(options: RunOptions, benchmark: str) -> RunOptions:
    """``options`` with the test set and rewards of ``benchmark``, a name or ``name=folder``."""
    name, _, folder = benchmark.partition("=")
    if name not in BENCHMARKS:
        raise ConfigError(
            f"unknown benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} "
            f"Known: {', '.join(BENCHMARKS)}"
        )
    public, kind, rewards = BENCHMARKS[name]
    other_rewards = {*options.train.reward_fn, *options.test.reward_fn}
    for _, _, names in BENCHMARKS.values():
        other_rewards.update(names)
    arguments = {}
    for reward, kwargs in options.test.reward_fn_kwargs.items():
        # Arguments of a name that no reward has are kept, so that they are refused.
        if reward in rewards or reward not in other_rewards:
            arguments[reward] = kwargs
    test = dataclasses.replace(
        options.test,
        reward_fn=dict.fromkeys(rewards, 1.0),
        reward_fn_kwargs=arguments,
        num_images=None,
        save_eval_images=True,
    )
    return dataclasses.replace(options, dataset=folder or public, prompt_fn=kind, test=test)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % confidence interval (None with fewer than two prompts)."""

    mean: float
    low: float | None
    high: float | None
    prompts: int

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Interval | None:
    """``statistic`` of ``count`` prompts with Efron's percentile interval.

    None if it is NaN or there is no prompt. ``statistic`` maps numbers of prompts (R, n) to its
    value for each row (R,). Always the same prompts are drawn.
    """
    mean = float(statistic(np.arange(count)[None])[0]) if count else math.nan
    if math.isnan(mean):
        return None
    if count == 1:
        return Interval(mean, None, None, 1)
    rng = np.random.default_rng(0)
    block = max(1, _BLOCK // count)  # of resamples in memory
    values = []
    for start in range(0, _RESAMPLES, block):
        size = (min(block, _RESAMPLES - start), count)
        values.append(statistic(rng.integers(count, size=size)))
    low, high = np.nanquantile(np.concatenate(values), [0.025, 0.975])
    return Interval(mean, float(low), float(high), count)


def interval(values: np.ndarray) -> Interval | None:
    """Mean of ``values`` (prompts,) with its interval; NaN = missing, None if all are."""
    values = values[~np.isnan(values)]
    return bootstrap(lambda chosen: values[chosen].mean(axis=1), len(values))


def by_prompt(
    rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], mean: Callable = np.mean
) -> np.ndarray:
    """Means of each prompt's images (prompts, rewards), prompts in order of first appearance.

    A missing score is NaN: ``np.mean`` leaves its prompt out, ``np.nanmean`` its image.
    """
    scores: dict[int, list[list[float | None]]] = {}  # item → images → rewards
    for row in rows:
        values = [row["rewards"][name] for name in rewards]
        scores.setdefault(row["item_id"], []).append(values)
    means = [mean(np.array(values, float), axis=0) for values in scores.values()]
    return np.array(means).reshape(-1, len(rewards))


def summarize_prompts(
    rows: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Interval | None]:
    """The interval over prompts of each reward, or of its difference ``rows`` − ``against``.

    A difference is paired by prompt. A prompt that lacks a score, on either side, is left out.
    """
    names = list(rows[0]["rewards"])
    values = by_prompt(rows, names)
    if against is not None:
        values = values - by_prompt(against, names)
    return {name: interval(column) for name, column in zip(names, values.T, strict=True)}


def markdown(columns: Mapping[str, Mapping[str, Interval | None]]) -> str:
    """Markdown, a row for each reward: mean and 95 % interval in each column, and the prompts."""
    rows = []
    for name in next(iter(columns.values())):
        cells = []
        counts = set()
        for column in columns.values():
            measured = column[name]
            cells.append(measured or "–")
            counts.add(str(measured.prompts) if measured else "0")
        rows.append([name, *cells, ", ".join(sorted(counts))])
    return markdown_table(["reward", *columns, "prompts"], rows)
