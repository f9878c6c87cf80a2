"""A run directory, read back into curves and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from paco_judge.images import UnreadableImage, read_image
from paco_judge.json_io import DamagedJson, lines, parse_object


class ReportError(RuntimeError):
    """A run directory cannot be reported on; the message names the file and the remedy."""


@dataclass(frozen=True)
class Curve:
    """One measured quantity over a run: sequences of equal length, in order of time."""

    epoch: tuple[int, ...]  # finished epochs
    value: tuple[float, ...]  # mean
    error: tuple[float, ...] | None  # standard error of the mean; None if the run gives none


@dataclass(frozen=True)
class Picture:
    """One image of an evaluation; ``reference``: the reference image of an edit."""

    file: Path
    prompt: str
    category: str | None
    rewards: Mapping[str, float | None]
    reference: Path | None = None


@dataclass(frozen=True)
class Run:
    """A run directory."""

    name: str
    config: Mapping[str, Any]
    train: Mapping[str, Curve]  # reward → mean of the training samples
    test: Mapping[str, Curve]  # reward → mean of the evaluations
    diagnostics: Mapping[str, Curve]  # other training metrics by their name in metrics.jsonl
    seconds: Mapping[str, float]  # phase (sampling, waiting for rewards, training, evaluation) → total
    pairs: Sequence[tuple[Picture, Picture]]  # same prompt and seed in the first and in the last evaluation
    epochs: int

    @property
    def resolutions(self) -> tuple[int | None, int | None]:
        """Training and test resolution in pixels, None without a configuration."""
        return tuple(self.config.get(part, {}).get("resolution") for part in ("train", "test"))  # type: ignore[return-value]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. The last line is ignored if it is cut short (a killed run).

    Raises:
        ReportError: The file does not exist, or another line is not a JSON object.
    """
    try:
        found = list(lines(path))
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror}); is {path.parent} a run directory?") from error
    rows = []
    for number, line in found:
        try:
            rows.append(parse_object(line))
        except DamagedJson as error:
            if number < found[-1][0]:
                raise ReportError(f"{path}, line {number} is {error}; correct or remove the line") from error
    return rows


def is_number(value: Any) -> bool:
    """Whether a value from a file is a finite number."""
    return type(value) in (int, float) and abs(value) < 1e300


def curves(
    rows: Sequence[Mapping[str, Any]], prefix: str, suffix: str = "_mean", error: str = "_stderr", divisor: float = 1.0
) -> dict[str, Curve]:
    """Every metric ``<prefix><name><suffix>`` as a curve by ``name``; its error is ``<prefix><name><error>`` / divisor."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix))
    found = {}
    for key in keys:
        name = key[len(prefix) : len(key) - len(suffix)]
        measured = [row for row in rows if is_number(row.get(key))]
        errors = [row.get(f"{prefix}{name}{error}") for row in measured]
        complete = bool(errors) and divisor > 0 and all(map(is_number, errors))
        found[name] = Curve(
            epoch=tuple(int(row["epoch"]) for row in measured),
            value=tuple(float(row[key]) for row in measured),
            error=tuple(float(value) / divisor for value in errors) if complete else None,
        )
    return found


def open_picture(file: Path) -> Image.Image:
    """RGB. Raises ReportError."""
    try:
        return read_image(file)
    except UnreadableImage as error:
        raise ReportError(f"image {file} {error}, or remove it") from error


def _pictures(folder: Path) -> dict[str, Picture]:
    """Images of one evaluation with their scores, by file name; those that were not saved are left out."""
    found = {}
    for row in read_json_lines(folder / "eval_data.jsonl"):
        names = (row.get(key) for key in ("file", "reference"))
        file, reference = (folder / name if name and isinstance(name, str) else None for name in names)
        if file and file.is_file() and isinstance(row.get("prompt"), str):
            reference = reference if reference and reference.is_file() else None
            given = row["rewards"].items() if isinstance(row.get("rewards"), dict) else ()
            rewards = {name: value if is_number(value) else None for name, value in given}
            category = row.get("category")
            category = category if isinstance(category, str) else None
            found[file.name] = Picture(file, row["prompt"], category, rewards, reference)
    return found


def _configuration(file: Path) -> dict[str, Any]:
    """Raises ReportError."""
    try:
        config = yaml.safe_load(file.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ReportError(f"{file} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    parts = (
        [config, *(config.get(part, {}) for part in ("sample", "train", "test"))] if isinstance(config, dict) else [0]
    )
    if not all(isinstance(part, dict) for part in parts):
        raise ReportError(f"{file} is not the configuration of a run; restore it, or remove it to do without")
    return config


def read_run(folder: str | Path) -> Run:
    """Read a run directory ({save_dir}/{run_name}).

    Raises:
        ReportError: metrics.jsonl is missing, unreadable or empty, or config.yaml is no configuration.
    """
    folder = Path(folder)
    rows = read_json_lines(folder / "metrics.jsonl")
    if odd := [row for row in rows if type(row.get("epoch")) is not int or not is_number(row["epoch"])]:
        raise ReportError(f"{folder / 'metrics.jsonl'} has a row without an epoch: {str(odd[0])[:80]}")
    train, test = ([row for row in rows if row.get("phase") == phase] for phase in ("train", "eval"))
    if not train and not test:
        raise ReportError(
            f"{folder / 'metrics.jsonl'} has no epoch and no evaluation yet; let the run finish one first"
        )
    file = folder / "config.yaml"
    config = _configuration(file) if file.is_file() else {}
    sample = [config.get("sample", {}).get(key) for key in ("num_images_per_prompt", "unique_sample_num_per_epoch")]
    images = math.prod(sample) if all(map(is_number, sample)) else 0
    diagnostics: dict[str, Curve] = {}
    for group in ("train/", "advantage/", "health/"):
        diagnostics |= curves(train, group, suffix="")
    phases = {"sampling": "sample", "waiting for rewards": "reward_wait", "training": "train", "evaluation": "eval"}
    times = {label: [row.get(f"time/{key}_s") for row in rows] for label, key in phases.items()}
    seconds = {label: sum(filter(is_number, values)) for label, values in times.items()}
    evaluations, pairs = sorted((folder / "eval").glob("epoch_*")), []
    if len(evaluations) > 1:
        before, after = _pictures(evaluations[0]), _pictures(evaluations[-1])
        # Evaluations use the same items and seeds in the same order: the file name identifies the image.
        pairs = [(before[n], after[n]) for n in before if n in after and before[n].prompt == after[n].prompt]
    return Run(
        name=folder.resolve().name,
        config=config,
        train=curves(train, "reward/", error="_std", divisor=math.sqrt(images)),
        test=curves(test, "eval/"),
        diagnostics=diagnostics,
        seconds={label: value for label, value in seconds.items() if value > 0},
        pairs=pairs,
        epochs=max(int(row["epoch"]) for row in rows),
    )
