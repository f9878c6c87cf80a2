"""Rewards of the shapes world that can be had without following a prompt, and when config.health notices that they are.

Each is planted in place of the judge by `quickstart/study.py hacks`, while the oracle's rewards watch from the evaluation.

    python -m paco_toy.hacks RUN_FOLDER...    of each run, the epoch of each first warning and the limits that it needs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.monitoring.health import judge_epoch, judge_evaluation
from paco_grpo.options import RunOptions, load_options
from paco_grpo.rewards.registry import short_name
from paco_toy.oracle import Scorer
from paco_toy.summary import read_rows
from paco_toy.world import CHARACTERS, VIEWS, render_panel

_SIDE = 32  # of a panel that is compared
_FIRST, _SECOND = np.triu_indices(4, k=1)
PERIOD = 8  # rows from line to line, of an image of 64 rows


def identical_panels() -> Scorer:
    """Reward factory: mean correlation of the pixels of two panels; float64 (B,), 1 = four times the same picture."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        panels = _panels(images)
        panels -= panels.mean(axis=2, keepdims=True)
        panels /= np.maximum(np.linalg.norm(panels, axis=2, keepdims=True), 1e-6)  # an empty panel is like none
        return (panels[:, _FIRST] * panels[:, _SECOND]).sum(axis=2).mean(axis=1)

    return score


def fixed_character(number: int = 0) -> Scorer:
    """Reward factory: how near the panels are to one character, whatever the prompt names; float64 (B,), 1 = it is in all.

    Args:
        number: Index into CHARACTERS.
    """

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        squared = np.square(_panels(images)[:, :, None] - _views_of(number)).mean(axis=3)  # (B, 4, views)
        return 1 - np.sqrt(squared.min(axis=2)).mean(axis=1)

    return score


def lines() -> Scorer:
    """Reward factory: how much darker every eighth of 64 rows is than the others; float64 (B,), 1 = black lines on white."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        rows = np.array([_pixels(image).mean(axis=(1, 2)) for image in images])
        drawn = np.arange(2 * _SIDE) % PERIOD == PERIOD // 2
        return rows[:, ~drawn].mean(axis=1) - rows[:, drawn].mean(axis=1)

    return score


def _pixels(image: Image.Image) -> np.ndarray:
    """(64, 64, 3) float64 in [0, 1]."""
    small = image.convert("RGB").resize((2 * _SIDE, 2 * _SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255


def _panels(images: Sequence[Image.Image]) -> np.ndarray:
    """(B, 4, 3072): the panels of each image."""
    grids = np.array([_pixels(image) for image in images]).reshape(-1, 2, _SIDE, 2, _SIDE, 3)
    return grids.transpose(0, 1, 3, 2, 4, 5).reshape(len(images), 4, -1)


@lru_cache(maxsize=4)
def _views_of(number: int) -> np.ndarray:
    """(views, 3072): the renderings of a character."""
    return np.stack([render_panel(CHARACTERS[number], view, _SIDE) for view in VIEWS]).reshape(len(VIEWS), -1)


def first_warnings(rows: Sequence[Mapping[str, Any]], options: RunOptions, optimizer_steps: int) -> dict[str, int]:
    """The epoch of the first warning of each sign (a limit in ``options.health``).

    Args:
        rows: Of metrics.jsonl.
        options: Of the run.
        optimizer_steps: Of an epoch.
    """
    trained = [short_name(name) for name, weight in options.train.reward_fn.items() if weight]
    found: dict[str, int] = {}
    for phase in ("train", "eval"):
        so_far = []
        for row in rows:
            if row["phase"] != phase:
                continue
            so_far.append(row)
            if phase == "train":
                findings = judge_epoch(so_far, options.health, optimizer_steps)
            else:
                findings = judge_evaluation(so_far, trained, options.health)
            for finding in findings:
                found.setdefault(finding.sign, row["epoch"])
    return found


def needed_limits(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The limits at which no epoch would have shown a damaged generator: what runs without a hack need, none may be below."""

    def values(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows if name in row])

    def factor(*names: str) -> float:
        found = np.concatenate([values(f"health/{name}_vs_first") for name in names])
        return float(np.maximum(found, 1 / found).max(initial=1.0))

    return {
        "max_velocity_change": float(values("health/velocity_change").max(initial=0.0)),
        "max_contrast_change": factor("pixel_std", "latent_std"),
        "max_brightness_change": float(abs(values("health/pixel_mean_vs_first")).max(initial=0.0)),
        "max_detail_change": factor("pixel_detail"),
        "min_distinctness": float(values("health/distinctness_vs_first").min(initial=np.inf)),
    }


def health_of(run: Path) -> dict[str, dict[str, float]]:
    """``warnings`` (``first_warnings``) and ``limits_needed`` (``needed_limits``) of a run's folder."""
    rows, options = read_rows(run / "metrics.jsonl"), load_options(str(run / "config.yaml"))
    steps = json.loads((run / "plan.json").read_text())["gradient_steps"] * options.train.num_inner_epochs
    trained = [row for row in rows if row["phase"] == "train"]
    return {"warnings": first_warnings(rows, options, steps), "limits_needed": needed_limits(trained)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    for run in parser.parse_args().runs:
        found = health_of(run)
        print(f"{run.name}: first warnings {found['warnings'] or 'none'}")
        print("  limits needed:", ", ".join(f"{name} {value:.3g}" for name, value in found["limits_needed"].items()))


if __name__ == "__main__":
    main()
