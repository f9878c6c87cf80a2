"""Where the numbers of a run go: always metrics.jsonl, and one of accelerate's trackers."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import SwanLabTracker, TensorBoardTracker, WandBTracker
from PIL import Image


class TrackingError(RuntimeError):
    """A tracker cannot start."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the finite numbers of ``row``."""
        row = {
            name: value
            for name, value in row.items()
            if not isinstance(value, float) or math.isfinite(value)
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Rows of one ``phase`` (``train``, ``eval``) or of all; a last line truncated by a kill is skipped."""
        *lines, _ = (
            self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else [""]
        )
        return [row for row in map(json.loads, lines) if phase in (None, row["phase"])]

    def keep_until(self, epoch: int) -> None:
        """Drop the rows after ``epoch``: a run that resumes there writes them again."""
        kept = [row for row in self.rows() if row["epoch"] <= epoch]
        replacement = self.path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        replacement.replace(self.path)


class Tracker:
    """accelerate's tracker called ``name`` (``config.logging_platform``); ``none`` does nothing."""

    def __init__(
        self, name: str, run_dir: Path, project: str, run_name: str, config: dict[str, Any]
    ) -> None:
        self.name, self.tracker = name, None
        try:
            if name == "tensorboard":
                self.tracker = TensorBoardTracker("tensorboard", run_dir)  # run_dir/tensorboard
            elif name == "wandb":  # continued under the run's name when the run resumes
                place = {"name": run_name, "id": run_name, "resume": "allow", "dir": str(run_dir)}
                self.tracker = WandBTracker(project, config=config, **place)
            elif (
                name == "swanlab"
            ):  # a resumed run is a new experiment: SwanLab continues an old one only online
                place = {"experiment_name": run_name, "logdir": str(run_dir / "swanlab")}
                self.tracker = SwanLabTracker(project, config=config, **place)
            if self.tracker is not None:
                self.tracker.start()
        except Exception as error:  # each tracker raises different errors
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise TrackingError(
                f"config.logging_platform={name!r} could not be started ({cause}): pip install {name}, and "
                f"`{name} login` or {name.upper()}_MODE=offline"
            ) from error
        if name == "wandb":
            # Its own step cannot decrease, but a resumed run writes the epochs after its checkpoint again.
            self.tracker.run.define_metric("epoch")
            self.tracker.run.define_metric("*", step_metric="epoch")

    def log(self, metrics: Mapping[str, Any], epoch: int) -> None:
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
            self.log(
                {name: [package.Image(image, caption=caption) for image, caption in images]}, epoch
            )

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.finish()
