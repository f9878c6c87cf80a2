"""Where the numbers of a run go: always metrics.jsonl, and one of accelerate's trackers."""

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import SwanLabTracker, TensorBoardTracker, WandBTracker
from PIL import Image

from paco_grpo.atomic import write_atomically
from paco_grpo.options import ConfigError
from paco_judge.json_io import parse_object

_DELETE_METRICS = "delete the file: the checkpoints do not need it, but its rows are lost"


class TrackingError(RuntimeError):
    """A tracker cannot start."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether there are rows, or something else that is in their place."""
        return self.path.is_file() or self.path.is_dir()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append ``row``.

        JSON cannot hold numbers that are not finite: their names go into ``not_finite``.
        """
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_storable(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Rows of one ``phase`` (``train``, ``eval``) or of all.

        A last line that a kill truncated is skipped.

        Raises:
            ConfigError: The file is damaged; the message names the line.
        """
        if not self.exists():
            return []
        try:
            *lines, _ = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be read ({error.strerror}); {_DELETE_METRICS}"
            ) from error
        rows = [self._row(number, line) for number, line in enumerate(lines, start=1) if line]
        return [row for row in rows if phase in (None, row["phase"])]

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = parse_object(line)
            if type(row.get("epoch")) is not int or row.get("phase") not in ("train", "eval"):
                raise ValueError("it has no epoch and phase")
        except ValueError as error:
            raise ConfigError(
                f"{self.path} is damaged in line {number} ({error}). Remove this line; or "
                f"{_DELETE_METRICS}"
            ) from error
        return row

    def keep_until(self, epoch: int) -> None:
        """Drop the rows after ``epoch``: a run that resumes there writes them again."""
        self._rewrite([row for row in self.rows() if row["epoch"] <= epoch])

    def set_aside(self) -> None:
        """Rename the file where a run begins again: no checkpoint continues its rows."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"replaced_{self.path.name}"))

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def _storable(row: Mapping[str, Any]) -> dict[str, Any]:
    finite = finite_numbers(row)
    lost = sorted(set(row) - set(finite))
    if lost:
        finite["not_finite"] = lost
    return finite


def finite_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` without the numbers that are not finite."""
    finite = {}
    for name, value in row.items():
        if not isinstance(value, float) or math.isfinite(value):
            finite[name] = value
    return finite


class Tracker:
    """accelerate's tracker called ``name`` (``config.logging_platform``); ``none`` does nothing."""

    def __init__(
        self, name: str, run_dir: Path, project: str, run_name: str, config: dict[str, Any]
    ) -> None:
        self.name = name
        self.tracker = None
        try:
            if name == "tensorboard":
                self.tracker = TensorBoardTracker("tensorboard", run_dir)  # run_dir/tensorboard
            elif name == "wandb":
                # A run that resumes is continued under its name.
                place = {"name": run_name, "id": run_name, "resume": "allow", "dir": str(run_dir)}
                self.tracker = WandBTracker(project, config=config, **place)
            elif name == "swanlab":
                # A resumed run is a new experiment: SwanLab continues an old one only online.
                place = {"experiment_name": run_name, "logdir": str(run_dir / "swanlab")}
                self.tracker = SwanLabTracker(project, config=config, **place)
            if self.tracker is not None:
                self.tracker.start()
        except Exception as error:  # each tracker raises different errors
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise TrackingError(
                f"config.logging_platform={name!r} could not be started ({cause}): "
                f"pip install {name}, and `{name} login` or {name.upper()}_MODE=offline"
            ) from error
        if name == "wandb":
            # Its own step cannot decrease, but a resumed run writes the epochs after its checkpoint
            # again.
            self.tracker.run.define_metric("epoch")
            self.tracker.run.define_metric("*", step_metric="epoch")

    def log(self, metrics: Mapping[str, Any], epoch: int) -> None:
        """Log the numbers of an epoch."""
        if self.name == "wandb":
            self.tracker.log({**metrics, "epoch": epoch})
        elif self.tracker is not None:
            self.tracker.log(dict(metrics), step=epoch)

    def log_images(self, name: str, images: Sequence[tuple[Image.Image, str]], epoch: int) -> None:
        """Log ``images`` with their captions."""
        if self.name == "tensorboard":
            for number, (image, caption) in enumerate(images):
                tag = f"{name}/{number}" if len(images) > 1 else name
                self.tracker.log_images(
                    {tag: np.asarray(image.convert("RGB"))[None]}, step=epoch, dataformats="NHWC"
                )
                self.tracker.log({f"{tag}_caption": caption}, step=epoch)
        elif self.tracker is not None:
            package = importlib.import_module(self.name)
            captioned = [package.Image(image, caption=caption) for image, caption in images]
            self.log({name: captioned}, epoch)

    def close(self) -> None:
        """Send what is left and end the tracker's run."""
        if self.tracker is not None:
            self.tracker.finish()
