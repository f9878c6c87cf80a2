"""Where the numbers of a run go: always metrics.jsonl, and a tracker."""

import importlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import SwanLabTracker, TensorBoardTracker, WandBTracker
from PIL import Image

from paco_grpo.options import ConfigError
from paco_judge.files import write_json_lines


class MetricsFile:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Append ``row``.

        JSON cannot hold numbers that are not finite: their names go into ``not_finite``.
        """
        stored = finite_numbers(row)
        if lost := sorted(row.keys() - stored.keys()):
            stored["not_finite"] = lost
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(stored) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Rows of one ``phase`` (``train``, ``eval``) or of all.

        A last line that a kill cut off is left out.
        """
        if not self.path.exists():
            return []
        rows = map(json.loads, self.path.read_bytes().split(b"\n")[:-1])
        return [row for row in rows if phase in (None, row["phase"])]

    def keep_until(self, epoch: int) -> None:
        """Drop the rows after ``epoch``: a run that resumes there writes them again."""
        self.replace([row for row in self.rows() if row["epoch"] <= epoch])

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write ``rows`` in place of those that are there."""
        write_json_lines(self.path, rows)

    def set_aside(self) -> None:
        """Rename the file where a run starts over: no checkpoint belongs to its rows."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"replaced_{self.path.name}"))


def finite_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` without the numbers that are not finite."""
    finite = {}
    for name, value in row.items():
        if not isinstance(value, float) or math.isfinite(value):
            finite[name] = value
    return finite


class Tracker:
    """The tracker called ``name`` (``config.logging_platform``); ``none`` does nothing."""

    def __init__(
        self, name: str, run_dir: Path, project: str, run_name: str, config: dict[str, Any]
    ) -> None:
        self.name = name
        self.tracker = None
        _hide_keys()
        try:
            if name == "tensorboard":
                self.tracker = TensorBoardTracker("tensorboard", run_dir)  # run_dir/tensorboard
            elif name == "wandb":
                place = {"name": run_name, "dir": str(run_dir)} | _identity(run_dir)
                self.tracker = WandBTracker(project, config=config, **place)
            elif name == "swanlab":
                place = {"experiment_name": run_name, "logdir": str(run_dir / "swanlab")}
                if os.environ.get("SWANLAB_MODE", "cloud") == "cloud":  # others cannot continue
                    place |= _identity(run_dir)
                self.tracker = SwanLabTracker(project, config=config, **place)
            if self.tracker is not None:
                self.tracker.start()
            if name == "trackio":
                # Not accelerate's, which drops the step. It finds a run by its name, which needs
                # the folder's id: two runs may have the same.
                unique = f"{run_name}-{_identity(run_dir)['id'][:8]}"
                trackio = importlib.import_module(name)
                self.tracker = trackio.init(project, unique, config=config, resume="allow")
        except Exception as error:  # each tracker raises different errors
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            account = (
                "" if name == "trackio" else f", `{name} login` or {name.upper()}_MODE=offline"
            )
            raise ConfigError(
                f"config.logging_platform={name!r} could not be started ({cause}): "
                f"pip install {name}{account}"
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
            if self.name == "trackio":  # which takes no lists of images
                self.log({f"{name}/{i}": image for i, image in enumerate(captioned)}, epoch)
            else:
                self.log({name: captioned}, epoch)

    def close(self) -> None:
        """Send what is left and end the tracker's run."""
        if self.tracker is not None:
            self.tracker.finish()


def _hide_keys() -> None:
    """Keys of servers in the command line, which wandb and SwanLab record."""
    for place, word in enumerate(sys.argv):
        if "api_key" in word:
            sys.argv[place] = word.partition("=")[0]
            # SwanLab reads the process's own, which cannot be changed.
            os.environ["SWANLAB_PROBE_RUNTIME"] = "false"


def _identity(run_dir: Path) -> dict[str, str]:
    """The tracker's name for the run, which stays in its folder; a resumed run continues there."""
    file = run_dir / "tracker_id"
    if file.exists():
        return {"id": file.read_text(), "resume": "allow"}
    identity = secrets.token_hex(11)[:21]  # SwanLab takes 21 letters and digits
    file.write_text(identity)
    return {"id": identity}
