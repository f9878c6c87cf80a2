"""summary.json: the results of a quickstart in numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_toy.console import columns
from paco_toy.oracle import Reading, read_grids, read_prompt
from paco_toy.processes import QuickstartError
from paco_toy.world import ATTRIBUTES, Character

# What an evaluation measures -> the label in the table. Consistency is that of full prompts: those of open ones have agreement.
MEASURES = {
    "consistency": "consistency, full prompts",
    "agreement": "agreement, open prompts",
    "choice": "evenness of their choice",
    "kappa": "agreement beyond chance (κ)",
    "reward": "the judge's score",
    "alignment": "panels show what is named",
    "view": "panels in the view asked for",
    "valid": "valid panels",
    "distinct": "panels differ in view",
}
_POOLED = ("choice", "kappa")  # no means over images
_RESAMPLES = 400  # of the prompts, for their standard error
PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "llamafactory", "numpy")


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON-lines file; a truncated line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


@dataclass(frozen=True)
class Evaluation:
    """The images of one evaluation folder, as the oracle reads them, and what the judge said of them.

    Attributes:
        named: What each image's prompt names, with what it leaves open.
        reading: Of the B images.
        scores: Measure -> float64 (B,), NaN where a measure does not apply to the prompt.
    """

    named: tuple[Character, ...]
    reading: Reading
    scores: dict[str, np.ndarray]

    @classmethod
    def of(cls, folder: Path) -> Evaluation:
        """Reads ``eval_data.jsonl`` and the images beside it.

        Raises:
            QuickstartError: The images were not saved.
        """
        rows = read_rows(folder / "eval_data.jsonl")
        if any(row["file"] is None for row in rows):
            raise QuickstartError(f"{folder} has no images for the oracle to read: leave test.save_eval_images=True")
        named, views = zip(*(read_prompt(row["prompt"]) for row in rows), strict=True)
        images = []
        for row in rows:
            with Image.open(folder / row["file"]) as image:
                images.append(image.convert("RGB"))
        reading = read_grids(images)
        is_open = np.array([bool(character.left_open) for character in named])
        scores = {
            "consistency": np.where(is_open, np.nan, reading.consistency()),
            "agreement": reading.agreement(named),
            "reward": np.array([row["rewards"].get("consistency_score") for row in rows], dtype=np.float64),
            "alignment": reading.alignment(named),
            "view": reading.view_following(np.array(views)),
            "valid": reading.valid.mean(axis=1),
            "distinct": reading.distinctness(),
        }
        return cls(named, reading, scores)

    def pooled(self, measure: str, rows: np.ndarray | slice = slice(None)) -> float:
        """``choice`` or ``kappa``: mean over the attributes that the prompts of these images leave open; NaN if there is none."""
        reading = Reading(*(getattr(self.reading, field.name)[rows] for field in dataclasses.fields(Reading)))
        named = [self.named[i] for i in np.arange(len(self.named))[rows]]
        values = [value for name in ATTRIBUTES if not math.isnan(value := getattr(reading, measure)(named, name))]
        return float(np.mean(values)) if values else math.nan

    def means(self) -> dict[str, float]:
        """Measure -> its mean over the images that it applies to; without measures that apply to none."""
        means = {name: float(np.nanmean(values)) for name, values in self.scores.items() if not np.isnan(values).all()}
        means |= {name: value for name in _POOLED if not math.isnan(value := self.pooled(name))}
        return {name: means[name] for name in MEASURES if name in means}


def changes(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    """Measure -> ``mean`` and paired ``stderr`` of after − before, for two evaluations of the same prompts and noise.

    The standard error of ``choice`` and ``kappa``, which are no means over images, is that of resampled prompts.
    """
    found = {}
    for name in after.means():
        if name in _POOLED:
            rng, count = np.random.default_rng(0), len(before.named)
            drawn = (rng.integers(count, size=count) for _ in range(_RESAMPLES))
            mean = after.pooled(name) - before.pooled(name)
            stderr = np.nanstd([after.pooled(name, rows) - before.pooled(name, rows) for rows in drawn])
        else:
            difference = after.scores[name] - before.scores[name]
            difference = difference[~np.isnan(difference)]
            mean, stderr = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
        found[name] = {"mean": float(mean), "stderr": float(stderr)}
    return found


def policy_measures(run: Path) -> dict[str, Any]:
    """``before`` and ``after``: means of a run's first and last evaluation; ``change`` between them; ``epochs``, ``num_images``.

    Raises:
        QuickstartError: The run has fewer than two evaluations, or they have no images.
    """
    folders = sorted(path.parent for path in (run / "eval").glob("epoch_*/eval_data.jsonl"))
    if len(folders) < 2:
        raise QuickstartError(f"{run}/eval has {len(folders)} evaluations; one before and one after training are needed")
    before, after = Evaluation.of(folders[0]), Evaluation.of(folders[-1])
    return {
        "before": before.means(), "after": after.means(), "change": changes(before, after),
        "epochs": int(folders[-1].name.removeprefix("epoch_")), "num_images": len(after.named),
    }  # fmt: skip


def versions(repo: Path) -> dict[str, str]:
    """Versions of Python and the main packages, and the commit (with `+changes`)."""
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}

    command = ["git", "-C", repo, "describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        found["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        found["commit"] = "unknown"
    return found


def build(
    results: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float], peak_rss_mb: int, seed: int, repo: Path
) -> dict:
    """The whole summary from the stages' results."""
    judge, rl = results["judge"], results["rl"]
    return {
        "judge": {which: judge[which] for which in ("base", "lora")},
        "rank": results["rank"],
        "policy": {key: rl[key] for key in ("before", "after", "change", "epochs", "num_images")},
        "train_resolution": rl["train_resolution"],
        "test_resolution": rl["test_resolution"],
        "engine": results["server"]["engine"],
        "stage_seconds": {name: round(value, 1) for name, value in seconds.items()},
        "peak_rss_mb": peak_rss_mb,
        "seed": seed,
        "versions": versions(repo),
    }


def table(summary: Mapping[str, Any]) -> str:
    """The small table at the end."""
    base, lora, rank = summary["judge"]["base"], summary["judge"]["lora"], summary["rank"]
    kinds = {name.split("_")[2]: name for name in lora["kinds"]}
    rows = [
        ("", "before", "after", "change"),
        ("judge: accuracy, held-out pairs", f"{base['accuracy']:.3f}", f"{lora['accuracy']:.3f}", ""),
        *((f"  {kind}", *(f"{m['kinds'][name]['accuracy']:.3f}" for m in (base, lora)), "") for kind, name in kinds.items()),
        ("judge: AUC", f"{base['auc']:.3f}", f"{lora['auc']:.3f}", ""),
        ("tau-b of histogram, of judge", f"{rank['histogram']['kendalltau']:.3f}", f"{rank['kendalltau']:.3f}", ""),
        (f"generator, {summary['test_resolution']} px, trained at {summary['train_resolution']} px", "", "", ""),
    ]
    policy = summary["policy"]
    for key, change in policy["change"].items():
        cells = (f"{policy['before'][key]:.3f}", f"{policy['after'][key]:.3f}", f"{change['mean']:+.3f} ±{change['stderr']:.3f}")
        label = MEASURES[key]
        rows.append((f"  {label}", *cells))
    return columns(rows)
