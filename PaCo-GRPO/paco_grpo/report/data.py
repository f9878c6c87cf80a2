"""A run directory, read back into curves and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml


class ReportError(RuntimeError):
    """A run directory cannot be reported on; the message names the file."""


@dataclass(frozen=True)
class Curve:
    """A mean by epoch; ``error`` is its standard error, NaN where the run gives none."""

    epoch: np.ndarray
    value: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class Picture:
    """One image of an evaluation; ``reference``: the reference image of an edit."""

    file: Path
    prompt: str
    category: str
    rewards: Mapping[str, float | None]
    reference: Path | None = None


@dataclass(frozen=True)
class Run:
    """A run directory."""

    name: str
    config: Mapping[str, Any]
    train: Mapping[str, Curve]  # reward → mean of the training samples
    test: Mapping[str, Curve]  # reward → mean of the evaluations
    diagnostics: Mapping[str, Curve]  # other training metrics
    seconds: Mapping[str, float]  # phase → total
    pairs: Sequence[tuple[Picture, Picture]]  # same prompt and seed in the first and in the last evaluation
    epochs: int

    def option(self, name: str) -> Any:
        """An option by its dotted name; None without a configuration."""
        found: Any = self.config
        for part in name.split("."):
            found = (found or {}).get(part)
        return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line that was cut short (a killed run) is left out. Raises ReportError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run directory?") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line) | {})
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ReportError(f"{path}, line {number} is not a JSON object; correct or remove the line") from error
    return rows


def curves(
    rows: Sequence[Mapping[str, Any]], prefix: str, suffix: str = "_mean", error: str = "_stderr", divisor: float = 1.0
) -> dict[str, Curve]:
    """Every metric ``<prefix><name><suffix>`` by ``name``; its error is ``<prefix><name><error>`` / divisor."""
    found = {}
    for key in dict.fromkeys(key for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix)):
        name = key[len(prefix) : len(key) - len(suffix)]
        points = [
            (row["epoch"], row[key], row.get(f"{prefix}{name}{error}")) for row in rows if row.get(key) is not None
        ]
        epoch, value, spread = np.array(points, dtype=float).reshape(-1, 3).T
        found[name] = Curve(epoch.astype(int), value, spread / divisor)
    return found


def _pictures(folder: Path) -> dict[str, Picture]:
    """Saved images of one evaluation with their scores, by file name."""
    found = {}
    for row in read_rows(folder / "eval_data.jsonl"):
        if row["file"]:
            reference = folder / row["reference"] if row.get("reference") else None
            found[row["file"]] = Picture(
                folder / row["file"], row["prompt"], row.get("category") or "", row["rewards"], reference
            )
    return found


def read_run(folder: str | Path) -> Run:
    """Read a run directory ({save_dir}/{run_name}). Raises ReportError."""
    folder = Path(folder)
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    rows = read_rows(metrics)
    train, test = ([row for row in rows if row.get("phase") == phase] for phase in ("train", "eval"))
    if not train and not test:
        raise ReportError(f"{metrics} has no epoch and no evaluation yet; let the run finish one first")
    try:
        options = yaml.safe_load(config.read_bytes()) if config.is_file() else {}
        sample = options.get("sample", {})
        images = sample.get("num_images_per_prompt", 0) * sample.get("unique_sample_num_per_epoch", 0)
        diagnostics = {
            n: c for part in ("train/", "advantage/", "health/") for n, c in curves(train, part, suffix="").items()
        }
        phases = {"sampling": "sample", "waiting for rewards": "reward_wait", "training": "train", "evaluation": "eval"}
        seconds = {name: sum(row.get(f"time/{key}_s") or 0 for row in rows) for name, key in phases.items()}
        evaluations, pairs = sorted((folder / "eval").glob("epoch_*")), []
        if len(evaluations) > 1:
            before, after = _pictures(evaluations[0]), _pictures(evaluations[-1])
            # Evaluations use the same items and seeds in the same order: the file name identifies the image.
            pairs = [(before[n], after[n]) for n in before if n in after and before[n].prompt == after[n].prompt]
        return Run(
            name=folder.resolve().name,
            config=options,
            train=curves(train, "reward/", error="_std", divisor=math.sqrt(images) if images else math.nan),
            test=curves(test, "eval/"),
            diagnostics=diagnostics,
            seconds={name: value for name, value in seconds.items() if value > 0},
            pairs=pairs,
            epochs=max(row["epoch"] for row in rows),
        )
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ReportError(f"{folder} holds something that no run writes ({type(error).__name__}: {error})") from error
