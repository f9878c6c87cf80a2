"""Real architectures with random weights.

They show an epoch's speed, its memory beside what scripts/estimate.py predicts, and the first
ratio.
"""

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tiny_run import write_edits

import epoch
from gpu_checks.steps import Deviates, Step
from paco_grpo.options import read_options

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"sample.unique_sample_num_per_epoch": 2, "sample.num_images_per_prompt": 8}
FEWER = SMALL | {"sample.num_images_per_prompt": 4}
# The most important first: configuration → options of a small epoch, and seconds at most.
MODELS = {
    "t2is": (SMALL, 150),
    "t2is_80gb": (SMALL, 200),
    "t2is_qwen": (FEWER, 150),
    "kontext_editing": (FEWER, 150),
    "qwen_editing": (FEWER, 150),
}
# exp(1e-3) moves a ratio by a thousandth. Above that, rollout and training compute different
# things.
RATIO_LIMIT = 1e-3


class FullSize:
    """Small epochs of the named configurations.

    What estimate.py predicts for them is computed meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.predicted: dict[str, float] = {}
        self._predicting: subprocess.Popen | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._predict, daemon=True)

    def start(self) -> None:
        """Let estimate.py run on the CPU from now on."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed = True
        if self._predicting is not None:
            self._predicting.terminate()

    def options(self, name: str) -> list[str]:
        """Command-line options of a small epoch of the configuration ``name``."""
        options: dict[str, Any] = dict(MODELS[name][0])
        if name.endswith("editing"):
            edits = self.folder / "edits"
            if not edits.is_dir():
                write_edits(edits)
            options |= {"dataset": edits, "prompt_fn": "geneval_image"}
        changes = [f"--config.{key}={value}" for key, value in options.items()]
        return ["--config", f"{ROOT}/config/grpo.py:{name}", *changes]

    def _predict(self) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
        for name in MODELS:
            if self._closed:
                return
            command = [sys.executable, str(ROOT / "scripts" / "estimate.py"), *self.options(name)]
            self._predicting = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            output, _ = self._predicting.communicate()
            peak = re.search(r"peak ([\d.]+) GiB", output)
            if peak:
                self.predicted[name] = float(peak[1])

    def measure(self, name: str) -> dict[str, Any]:
        """An epoch after one that warms up."""
        folder = self.folder / name
        folder.mkdir()
        words = [*self.options(name), "--random_weights", "--repeats", "1"]
        arguments, rest = epoch.parser().parse_known_args(words)
        options, _ = read_options([*rest, *epoch.changes(arguments, str(folder))])
        report = epoch.measure(arguments, options, name, str(folder))
        figures = figures_of(report)
        if figures["first_ratio"] is not None and figures["first_ratio"] > RATIO_LIMIT:
            raise Deviates(
                f"the first ratio is {figures['first_ratio']:.2g} away from 1; {figures}"
            )
        return figures

    def with_prediction(self, name: str) -> dict[str, Any]:
        """``measure``, with the peak that estimate.py printed, if it has finished."""
        figures = self.measure(name)
        return figures | {"predicted_gib": self.predicted.get(name)}


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """Images a second of each phase, memory, and the deviation of the first ratio from 1."""
    medians = report["medians"]
    samples = report["samples"]
    metrics = report["epochs"][-1]["metrics"]
    return {
        "images": samples,
        "sample_per_s": samples / medians["sample_s"],
        "train_per_s": samples / medians["train_s"],
        "epoch_per_s": report["images_per_second"],
        "peak_gib": medians.get("peak_gpu_gib"),
        "first_ratio": metrics.get("train/ratio_deviation"),
    }


def steps(full: FullSize) -> list[Step]:
    """One for each configuration, the most important first."""
    return [
        Step(name, seconds, functools.partial(full.with_prediction, name))
        for name, (_, seconds) in MODELS.items()
    ]
