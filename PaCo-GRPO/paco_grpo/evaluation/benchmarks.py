"""Benchmarks: prompts, and rewards that measure their images; results over prompts, and two adapters compared."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paco_grpo.evaluation.pictures import markdown_table, read_rows
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import Reward
from paco_grpo.suggest import did_you_mean
from paco_grpo.types import Item

# Name → prompt set as dataset/fetch.py writes it, its kind, and the rewards that measure its images.
BENCHMARKS = {
    "t2is": ("dataset/public-t2is", "geneval", ("consistency_score", "subfig_clipT", "pickscore")),
    "gedit": ("dataset/public-gedit", "geneval_image", ("consistency_for_editing",)),
}


def options_for(options: RunOptions, benchmark: str) -> RunOptions:
    """``options`` with the test set and the test rewards of ``benchmark``, a name or ``name=folder``."""
    name, _, folder = benchmark.partition("=")
    if name not in BENCHMARKS:
        raise ConfigError(
            f"unknown benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} Known: {', '.join(BENCHMARKS)}"
        )
    public, kind, rewards = BENCHMARKS[name]
    others = {*options.train.reward_fn, *options.test.reward_fn}.union(
        *(names for *_, names in BENCHMARKS.values())
    )
    arguments = (
        options.test.reward_fn_kwargs.items()
    )  # of a name that no reward has: kept, so that it is refused
    test = dataclasses.replace(
        options.test,
        reward_fn=dict.fromkeys(rewards, 1.0),
        reward_fn_kwargs={
            name: given for name, given in arguments if name in rewards or name not in others
        },
        num_images=None,
        save_eval_images=True,
    )
    return dataclasses.replace(options, dataset=folder or public, prompt_fn=kind, test=test)


def begin(
    folder: Path,
    options: RunOptions,
    items: Sequence[Item],
    rewards: Mapping[str, Reward],
    adapter: Path | None,
) -> bool:
    """Record in ``folder`` what its images and scores depend on, so that only the same command continues there.

    Returns whether all are there already.
    """
    test = {
        name: value
        for name, value in dataclasses.asdict(options.test).items()
        if not name.startswith("reward")
    }
    weights = hashlib.sha256()
    for file in sorted(adapter.iterdir()) if adapter else ():
        if file.suffix == ".safetensors" or file.name == "adapter_config.json":
            weights.update(file.read_bytes())
    content = {
        "model": str(options.pretrained.model),
        "adapter": adapter,
        "adapter_sha256": weights.hexdigest() if adapter else None,
        "prompts_sha256": hashlib.sha256(
            json.dumps([[i.item_id, i.prompt] for i in items]).encode()
        ).hexdigest(),
        "guidance_scale": options.sample.guidance_scale,
        "negative_prompt": options.sample.negative_prompt,
        "max_sequence_length": options.max_sequence_length,
        "seed": options.seed,
        "test": test,
        "rewards": {
            name: [
                {key: value for key, value in reward.kwargs.items() if key != "api_key"},
                reward.record,
            ]
            for name, reward in rewards.items()
        },
    }
    content = json.loads(json.dumps(content, default=str))
    path, metrics = folder / "evaluation.json", folder / "metrics.json"
    if path.is_file() or any(folder.glob("[0-9]*.png")):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        changed = [
            name for name in content if name != "adapter" and found.get(name) != content[name]
        ]
        if of_images := [name for name in changed if name != "rewards"]:
            raise ConfigError(
                f"{folder} holds images with another {', '.join(of_images)}: choose another --output"
            )
        complete = not changed and metrics.is_file()
        if complete and all(None not in row["rewards"].values() for row in read_rows(folder)):
            return True
    folder.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return False


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % confidence interval (None with fewer than two prompts)."""

    mean: float
    low: float | None
    high: float | None
    prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (
            "" if self.low is None else f" [{self.low:.4f}, {self.high:.4f}]"
        )


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Interval | None:
    """``statistic`` of ``count`` prompts with Efron's percentile interval; None if it is NaN or there is no prompt.

    ``statistic`` maps numbers of prompts (R, n) to its value for each row (R,). Always the same prompts are drawn.
    """
    mean = float(statistic(np.arange(count)[None])[0]) if count else math.nan
    if math.isnan(mean):
        return None
    if count == 1:
        return Interval(mean, None, None, 1)
    drawn = statistic(np.random.default_rng(0).integers(count, size=(10_000, count)))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Interval(mean, float(low), float(high), count)


def interval(values: np.ndarray) -> Interval | None:
    """Mean of ``values`` (prompts,) with its ``bootstrap`` interval; NaN = missing, None if all are."""
    values = values[~np.isnan(values)]
    return bootstrap(lambda chosen: values[chosen].mean(axis=1), len(values))


def by_prompt(
    rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], mean: Callable = np.mean
) -> np.ndarray:
    """Means of each prompt's images (prompts, rewards), prompts in order of first appearance.

    A missing score is NaN: ``np.mean`` leaves its prompt out, ``np.nanmean`` its image.
    """
    scores: dict[int, list[list[float | None]]] = {}
    for row in rows:
        scores.setdefault(row["item_id"], []).append([row["rewards"][name] for name in rewards])
    return np.array([mean(np.array(values, float), axis=0) for values in scores.values()]).reshape(
        -1, len(rewards)
    )


def summarize_prompts(
    rows: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Interval | None]:
    """Each reward's interval over prompts, or of its difference ``rows`` − ``against``, paired by prompt.

    A prompt that lacks a score, on either side, is left out.
    """
    names = list(rows[0]["rewards"])
    values = by_prompt(rows, names)
    if against is not None:
        values = values - by_prompt(against, names)
    return {name: interval(column) for name, column in zip(names, values.T, strict=True)}


def markdown(columns: Mapping[str, Mapping[str, Interval | None]]) -> str:
    """Markdown, a row for each reward: mean and 95 % interval in each column, and the prompts that count."""
    rows = []
    for name in next(iter(columns.values())):
        found = [column[name] for column in columns.values()]
        counts = ", ".join(sorted({str(each.prompts) if each else "0" for each in found}))
        rows.append([name, *(each or "–" for each in found), counts])
    return markdown_table(["reward", *columns, "prompts"], rows)
