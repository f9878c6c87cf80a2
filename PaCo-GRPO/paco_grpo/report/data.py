"""What a report is made from: a run directory, read back into curves and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml


class ReportError(RuntimeError):
    """A run directory cannot be reported on; the message names the file and the remedy."""


@dataclass(frozen=True)
class Curve:
    """One measured quantity over a run. Sequences of equal length, in order of time.

    Attributes:
        epoch: Finished epochs.
        minutes: Training minutes (without evaluations where the run recorded them apart).
        value: Mean.
        error: Standard error of the mean; None where the run gives none.
    """

    epoch: tuple[int, ...]
    minutes: tuple[float, ...]
    value: tuple[float, ...]
    error: tuple[float, ...] | None


@dataclass(frozen=True)
class Picture:
    """One image of an evaluation: its file, prompt, category and scores; an edited one's reference image."""

    file: Path
    prompt: str
    category: str | None
    rewards: Mapping[str, float | None]
    reference: Path | None = None


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        train: Reward name -> curve of the training samples' mean.
        test: Reward name -> curve of the evaluations' mean.
        diagnostics: Other training metrics by their name in metrics.jsonl.
        seconds: Phase (sampling, waiting for rewards, training, evaluation) -> seconds in all.
        pairs: (before, after): the same prompt and seed in the first and the last evaluation.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    train: Mapping[str, Curve]
    test: Mapping[str, Curve]
    diagnostics: Mapping[str, Curve]
    seconds: Mapping[str, float]
    pairs: Sequence[tuple[Picture, Picture]]
    epochs: int

    @property
    def resolutions(self) -> tuple[int | None, int | None]:
        """Training and test resolution in pixels, None where the configuration is not there."""
        return tuple(self.config.get(part, {}).get("resolution") for part in ("train", "test"))  # type: ignore[return-value]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. The last line may be cut short (a killed run) and is then left out.

    Raises:
        ReportError: The file is not there, or another line is no JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run directory?") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ReportError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def curves(rows: Sequence[Mapping[str, Any]], prefix: str, suffix: str = "_mean", error: str = "_stderr") -> dict[str, Curve]:
    """Every metric ``<prefix><name><suffix>`` as a curve by ``name``."""
    names = dict.fromkeys(
        key[len(prefix) : len(key) - len(suffix)] for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix)
    )
    found = {}
    for name in names:
        key = f"{prefix}{name}{suffix}"
        there = [row for row in rows if isinstance(row.get(key), (int, float))]
        errors = [row.get(f"{prefix}{name}{error}") for row in there]
        found[name] = Curve(
            epoch=tuple(int(row["epoch"]) for row in there),
            minutes=tuple(row.get("train_time", row["time"]) / 60 for row in there),
            value=tuple(float(row[key]) for row in there),
            error=tuple(map(float, errors)) if errors and all(e is not None for e in errors) else None,
        )
    return found


def _training_curves(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Curve]:
    """Rewards of the training samples; their standard error follows from the spread and the images of an epoch."""
    sample = config.get("sample", {})
    images = sample.get("num_images_per_prompt", 0) * sample.get("unique_sample_num_per_epoch", 0)
    found = {}
    for name, curve in curves(rows, "reward/", error="_std").items():
        error = tuple(s / math.sqrt(images) for s in curve.error) if curve.error and images else None
        found[name] = replace(curve, error=error)
    return found


def _config(folder: Path) -> dict[str, Any]:
    for name in ("config.json", "config.yaml"):
        path = folder / name
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    return {}


def pictures(folder: Path) -> list[Picture]:
    """Images of one evaluation with their scores; those that were not saved are left out."""
    found = []
    for row in read_json_lines(folder / "eval_data.jsonl"):
        if row.get("file") and (folder / row["file"]).is_file():
            reference = folder / row["reference"] if row.get("reference") else None
            if reference and not reference.is_file():
                reference = None
            picture = Picture(folder / row["file"], row["prompt"], row.get("category"), row.get("rewards", {}), reference)
            found.append(picture)
    return found


def _pairs(evaluations: Sequence[Path]) -> list[tuple[Picture, Picture]]:
    if len(evaluations) < 2:
        return []
    before = {p.file.name: p for p in pictures(evaluations[0])}
    after = {p.file.name: p for p in pictures(evaluations[-1])}
    # Evaluations draw the same items from the same seeds, in one order: the file name is the image.
    return [(before[n], after[n]) for n in before if n in after and before[n].prompt == after[n].prompt]


def read_run(folder: str | Path) -> Run:
    """Read a run directory ({save_dir}/{run_name}).

    Raises:
        ReportError: metrics.jsonl is missing, unreadable or empty.
    """
    folder = Path(folder)
    rows = read_json_lines(folder / "metrics.jsonl")
    train = [row for row in rows if row.get("phase") == "train"]
    test = [row for row in rows if row.get("phase") == "eval"]
    if not train and not test:
        raise ReportError(f"{folder / 'metrics.jsonl'} has no epoch and no evaluation yet; let the run finish one first")
    phases = {"sampling": "sample", "waiting for rewards": "reward_wait", "training": "train"}
    seconds = {label: sum(row.get(f"time/{key}_s", 0.0) for row in train) for label, key in phases.items()}
    config = _config(folder)
    seconds["evaluation"] = sum(row.get("time/eval_s", 0.0) for row in test)
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        train=_training_curves(train, config),
        test=curves(test, "eval/"),
        diagnostics={
            name: curve
            for group in ("train/", "advantage/", "health/")
            for name, curve in curves(train, group, suffix="").items()
        },
        seconds={label: value for label, value in seconds.items() if value > 0},
        pairs=_pairs(sorted((folder / "eval").glob("epoch_*"))),
        epochs=max(int(row["epoch"]) for row in rows),
    )
