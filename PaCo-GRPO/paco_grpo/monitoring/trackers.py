"""Where the numbers of a run go: always metrics.jsonl, and one tracker chosen by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


class Tracker:
    """Interface of a tracker; this one does nothing (``none``: only metrics.jsonl)."""

    def __init__(self, run_dir: Path, project: str, run_name: str, config: dict[str, Any]) -> None:
        pass

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Log the numbers of one epoch."""

    def log_images(self, name: str, images: Sequence[tuple[Image.Image, str]], epoch: int) -> None:
        """Log pictures with their captions."""

    def close(self) -> None:
        """Flush and end."""


class TrackingError(RuntimeError):
    """A tracker cannot be used; the message says what to install or choose."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line, append only; a resumed run continues after its earlier lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Rows so far, of one ``phase`` (``train``, ``eval``) or of all; a last line truncated by a kill is skipped.

        Raises:
            TrackingError: Another line is damaged; the message has its number.
        """
        if not self.path.is_file():
            return []
        rows = []
        *lines, _ = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(_row(line.decode("utf-8")))
            except (ValueError, RecursionError) as error:
                raise TrackingError(f"{self.path}, line {number} is damaged ({error}): correct or remove it") from error
        return [row for row in rows if phase in (None, row["phase"])]

    def keep_until(self, epoch: int) -> None:
        """Drop the rows after ``epoch``: a run that resumes there writes them again."""
        kept = [row for row in self.rows() if row["epoch"] <= epoch]
        replacement = self.path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        replacement.replace(self.path)


def _row(line: str) -> dict[str, Any]:
    """A line of metrics.jsonl. Raises ValueError if it is none."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("epoch")) is not int or row.get("phase") not in ("train", "eval"):
        raise ValueError("a row is an object with an epoch and a phase")
    wrong = [name for name, value in row.items() if name != "phase" and type(value) not in (int, float)]
    if wrong:
        raise ValueError(f"{wrong[0]} is not a number")
    return row


class TensorboardTracker(Tracker):
    """Event files in ``run_dir/tensorboard``."""

    def __init__(self, run_dir: Path, project: str, run_name: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch)

    def log_images(self, name: str, images: Sequence[tuple[Image.Image, str]], epoch: int) -> None:
        for number, (image, caption) in enumerate(images):
            tag = f"{name}/{number}" if len(images) > 1 else name
            self.writer.add_image(tag, np.asarray(image.convert("RGB")), epoch, dataformats="HWC")
            self.writer.add_text(f"{tag}_caption", caption, epoch)

    def close(self) -> None:
        self.writer.close()


class WandbTracker(Tracker):
    """Weights & Biases, continued under the run directory's name when a run resumes."""

    def __init__(self, run_dir: Path, project: str, run_name: str, config: dict[str, Any]) -> None:
        import wandb

        self.wandb = wandb
        self.run = wandb.init(
            project=project, name=run_name, id=run_name, resume="allow", dir=str(run_dir), config=config
        )
        # wandb's own step cannot decrease, but a resumed run writes the epochs after its checkpoint again.
        self.run.define_metric("epoch")
        self.run.define_metric("*", step_metric="epoch")

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        self.run.log({**metrics, "epoch": epoch})

    def log_images(self, name: str, images: Sequence[tuple[Image.Image, str]], epoch: int) -> None:
        shown = [self.wandb.Image(image, caption=caption) for image, caption in images]
        self.run.log({name: shown, "epoch": epoch})

    def close(self) -> None:
        self.run.finish()


class SwanlabTracker(Tracker):
    """SwanLab. A resumed run is a new experiment there: SwanLab continues an old one only online."""

    def __init__(self, run_dir: Path, project: str, run_name: str, config: dict[str, Any]) -> None:
        import swanlab

        self.swanlab = swanlab
        swanlab.init(project=project, experiment_name=run_name, logdir=str(run_dir / "swanlab"), config=config)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        self.swanlab.log(dict(metrics), step=epoch)

    def log_images(self, name: str, images: Sequence[tuple[Image.Image, str]], epoch: int) -> None:
        self.swanlab.log({name: [self.swanlab.Image(image, caption=caption) for image, caption in images]}, step=epoch)

    def close(self) -> None:
        self.swanlab.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanlabTracker,
    "none": Tracker,
}


def build_tracker(name: str, run_dir: Path, project: str, run_name: str, config: dict[str, Any]) -> Tracker:
    """The tracker called ``name`` (``config.logging_platform``).

    Raises:
        TrackingError: Its package is not installed, or it does not start (nobody is logged in).
    """
    others = f"or choose another of {', '.join(TRACKERS)}"
    try:
        return TRACKERS[name](run_dir, project, run_name, config)
    except ImportError as error:
        raise TrackingError(
            f"config.logging_platform={name!r} needs a package that is not installed ({error}); "
            f"pip install {name}, {others}"
        ) from error
    except Exception as error:  # each tracker raises different errors
        raise TrackingError(
            f"config.logging_platform={name!r} could not be started: {str(error).splitlines()[0]} Log in with "
            f"`{name} login`, set {name.upper()}_MODE=offline to log offline, {others}"
        ) from error
