"""Reads a run's folder: curves, pairs of images, and what was warned."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from paco_grpo.monitoring.log import Warned, logged_warnings
from paco_grpo.monitoring.metrics import means
from paco_grpo.monitoring.signs import Finding, findings_of_run, with_ratios
from paco_judge.errors import UserError
from paco_judge.files import locked, read_json_lines

HEALTH = (
    "reward/within_minus_between",
    "health/diversity_vs_first",
    "health/distinctness_vs_first",
    "health/velocity_change",
    "health/latent_std_vs_first",
    "train/grad_norm",
    "train/ratio_mean",
    "train/clip_share",
    "advantage/zero_std_share",
)
PHASES = {"sample": "sampling", "reward_wait": "rewards", "train": "training", "eval": "evaluation"}

Row = Mapping[str, Any]
Curves = dict[str, np.ndarray]  # metric → (N, 4): epoch, mean, its standard error, images; or NaN


class Pair(NamedTuple):
    """Rows of eval_data.jsonl for one prompt and seed, in the first and in the last evaluation."""

    before: Row
    after: Row

    def scores(self, reward: str) -> tuple[float | None, float | None]:
        """Its scores before and after; None where one is missing, or is of another prompt set."""
        name_of_set, _, name = reward.rpartition("/")
        if name_of_set and name_of_set != self.before.get("dataset"):
            return None, None
        return self.before["rewards"].get(name), self.after["rewards"].get(name)

    @property
    def heading(self) -> str:
        """Its prompt set, where a run has several, and its category."""
        parts = (self.before.get("dataset"), self.before.get("category"))
        return " · ".join(filter(None, parts))


@dataclass(frozen=True)
class RunReport:
    """A run directory ({save_dir}/{run_name}), read back.

    Rewards of a run with several prompt sets are called SET/REWARD.
    """

    name: str
    config: Mapping[str, Any]  # as in config.yaml
    weights: Mapping[str, float]  # of the trained rewards; others are only monitored
    train: Curves  # rewards of the training samples
    test: Curves  # rewards of the evaluations
    overall: Curves  # rewards of the evaluations, over all prompt sets
    health: Curves
    seconds: Mapping[str, float]  # phase → total
    pairs: Sequence[Pair]
    epochs: int
    best: Row | None  # the best evaluation; None: none has a trained reward
    missing: Mapping[str, float]  # reward → share of the last evaluation's images without it
    findings: Sequence[tuple[int, Finding]]  # signs of collapse, with their epochs
    warnings: Sequence[Warned]  # other ones
    state: str  # "running", "finished" or "stopped"


def read_run(folder: Path) -> RunReport:
    """Read a run directory.

    Raises:
        UserError: It has no epoch and no evaluation yet, or is no run's folder.
    """
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: {folder} is not the folder of a run, or its first epoch is "
            "not over yet"
        )
    whole_lines, _, _ = file.read_bytes().rpartition(b"\n")  # the run may be writing one
    rows = list(map(json.loads, whole_lines.splitlines()))
    if not rows:
        raise UserError(f"{file} has no epoch and no evaluation yet; let the run finish one first")
    train = [row for row in rows if row["phase"] == "train"]
    test = [row for row in rows if row["phase"] == "eval"]
    config = yaml.safe_load((folder / "config.yaml").read_bytes())
    health = {}
    epochs = with_ratios(train)
    for name in HEALTH:
        curve = _curve(epochs, name)
        if len(curve):
            health[name] = curve
    seconds = {}
    for key, phase in PHASES.items():
        total = 0.0
        for row in rows:
            total += row.get(f"time/{key}_s") or 0
        if total > 0:
            seconds[phase] = total
    sample = config["sample"]
    num_images = sample["unique_sample_num_per_epoch"] * sample["num_images_per_prompt"]
    counts = _counts(folder / "eval")
    overall = _reward_curves(test, "eval/", counts)
    if config.get("datasets"):
        train_curves = _reward_curves(train, "set/", {})
        test_curves = _reward_curves(test, "set/", counts)
    else:
        train_curves = _reward_curves(train, "reward/", {}, num_images)
        test_curves = overall
    weights = _trained_weights(config)
    trained: dict[str, list[str]] = {}
    for reward in weights:
        name_of_set, _, name = reward.rpartition("/")
        trained.setdefault(f"set/{name_of_set}/" if name_of_set else "eval/", []).append(name)
    return RunReport(
        name=folder.resolve().name,
        config=config,
        weights=weights,
        train=train_curves,
        test=test_curves,
        overall=overall,
        health=health,
        seconds=seconds,
        pairs=_read_pairs(folder / "eval"),
        epochs=rows[-1]["epoch"],
        best=_best(test),
        missing=_missing(test, "set/" if config.get("datasets") else "eval/"),
        findings=findings_of_run(rows, trained),
        warnings=logged_warnings(folder),
        state=_state(folder, rows[-1], config),
    )


def _trained_weights(config: Mapping[str, Any]) -> dict[str, float]:
    train = config["train"]
    weights = {}
    for name_of_set, options in (config.get("datasets") or {"": train}).items():
        for name, weight in (options["reward_fn"] or train["reward_fn"]).items():
            short = name.rpartition(":")[2]
            if weight:
                weights[f"{name_of_set}/{short}" if name_of_set else short] = weight
    return weights


def _state(folder: Path, last: Row, config: Mapping[str, Any]) -> str:
    minutes = config.get("max_train_minutes")
    is_over = minutes is not None and last.get("train_time", 0) >= 60 * minutes
    if is_over or last["epoch"] >= config["num_epochs"]:
        return "finished"
    if not (folder / ".lock").exists():
        return "stopped"
    try:
        with locked(folder):
            return "stopped"
    except UserError:  # its trainer holds the lock
        return "running"


def _best(evaluations: Sequence[Row]) -> Row | None:
    """The evaluation that the run calls the best (``training.best``)."""
    if not evaluations:
        return None
    epoch = evaluations[-1].get("eval/best_epoch")
    return next((row for row in evaluations if row["epoch"] == epoch), None)


def _missing(evaluations: Sequence[Row], prefix: str) -> dict[str, float]:
    shares = {}
    for key, share in (evaluations[-1] if evaluations else {}).items():
        if key.startswith(prefix) and key.endswith("_missing"):
            shares[key.removeprefix(prefix).removesuffix("_missing")] = share
    return shares


def _counts(evaluations: Path) -> dict[tuple[int, str], int]:
    """Images with a score, by epoch of the evaluation and reward (REWARD and SET/REWARD)."""
    counts: Counter[tuple[int, str]] = Counter()
    for file in evaluations.glob("epoch_*[0-9]/eval_data.jsonl"):
        epoch = int(file.parent.name.removeprefix("epoch_"))
        for row in read_json_lines(file):
            for name, score in row["rewards"].items():
                if score is not None:
                    counts[epoch, name] += 1
                    counts[epoch, f"{row.get('dataset')}/{name}"] += 1
    return counts


def _curve(rows: Sequence[Row], name: str) -> np.ndarray:
    """The metric ``name`` by epoch."""
    points = []
    for row in rows:
        if math.isfinite(row.get(name, math.nan)):
            points.append((row["epoch"], row[name], math.nan, math.nan))
    return np.array(points, dtype=float).reshape(-1, 4)


def _reward_curves(
    rows: Sequence[Row],
    prefix: str,
    counts: Mapping[tuple[int, str], int],
    num_images: float = math.nan,
) -> Curves:
    """Rewards of ``rows``, with their ``counts`` if these are known.

    The standard error of an epoch is over its ``num_images``; with several prompt sets it is not
    known.
    """
    points: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        for name, mean in means(row, prefix).items():
            in_all = row.get("eval/num_images", num_images) if prefix != "set/" else math.nan
            count = counts.get((row["epoch"], name), in_all)
            error = row.get(f"{prefix}{name}_stderr")
            if error is None:
                error = row.get(f"{prefix}{name}_std", math.nan) / math.sqrt(num_images)
            points.setdefault(name, []).append((row["epoch"], mean, error, count))
    return {name: np.array(values, dtype=float) for name, values in points.items()}


def _read_pairs(evaluations: Path) -> list[Pair]:
    """The images that both the first and the last evaluation saved."""
    # Written when all images are there; epoch_0010_keep is the user's own.
    files = evaluations.glob("epoch_*[0-9]/eval_data.jsonl")
    files = sorted(files, key=lambda file: (len(file.parent.name), file))
    if len(files) < 2:
        return []
    first = _saved_rows(files[0])
    last = _saved_rows(files[-1])
    pairs = []
    for key, before in first.items():
        if key in last:
            pairs.append(Pair(before, last[key]))
    return pairs


def _saved_rows(file: Path) -> dict[tuple[str, int], Row]:
    """Rows of an evaluation whose images were saved, by prompt and seed, with whole paths.

    Not by file name: a run may be resumed with other test options.
    """
    rows = {}
    for row in read_json_lines(file):
        if row["file"]:
            for key in ("file", "reference"):
                if row.get(key):
                    row[key] = file.parent / row[key]
            rows[row["prompt"], row["seed"]] = row
    return rows
