"""Seconds of an epoch of this commit against an earlier one, on one CPU thread, also while other programs run.

    python benchmarks/compare_commits.py --base 8526f20 --variant "" --variant "sample.tail_steps=4 sample.tail_order=2"

Both commits are checked out beside each other, and scripts/train.py of each trains the quickstart's generator: 64 px, 512
text tokens, batch 16, 64 images of 8 prompts, 10 steps, 1 of them trained, PPO without KL. A variant is a list of options
for this commit (a.b=VALUE; "" is the commit as it is). Their processes take turns: all but one are stopped (SIGSTOP), for
a quarter of a second each, so that whatever else the machine does slows all of them alike. A round is one epoch of each.

Prints a Markdown table of ratios to the base: median (smallest–largest) of the rounds, of the process's CPU time and of
the wall-clock time of its turns. Needs Linux, git, and the packages of both commits (those before 0.2: ml_collections).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from measuring.report import table

ROOT = Path(__file__).resolve().parents[2]
SLICE, POLL = 0.25, 0.005  # seconds
SETTINGS: dict[str, object] = {
    "num_threads": 1, "max_sequence_length": 512, "train.resolution": 64, "test.resolution": 64, "item_size": "aspect",
    "sample.batch_size": 16, "sample.num_images_per_prompt": 8, "sample.num_steps": 10, "sample.noise_steps": "1",
    "train.batch_size": 16, "train.loss_type": "ppo", "train.beta": 0.0,
    "train.reward_fn": {"jpeg_compressibility": 1.0}, "train.reward_fn_kwargs": {}, "train.aggregate_fn": None, "test.reward_fn": {},
    "test.reward_fn_kwargs": {}, "eval_freq": 0, "save_freq": 0, "test.at_start": False, "health.probe_images": 0,
    "logging_platform": "none", "num_epochs": 1_000_000, "max_train_minutes": None,
}  # fmt: skip


class Trainer:
    """A run of scripts/train.py that is stopped except in its turns."""

    def __init__(self, tree: Path, folder: Path, label: str, options: Mapping[str, object]) -> None:
        self.label, self._cpu, self._wall = label, 0.0, 0.0
        self.rows = folder / "run" / "metrics.jsonl"
        self._log = folder / "log.txt"
        folder.mkdir(parents=True)
        given = {**SETTINGS, "save_dir": folder, "run_name": "run", **options}
        packages = [str(tree / name) for name in ("PaCo-GRPO", "PaCo-Reward/judge", "quickstart")]
        self.process = subprocess.Popen(
            [sys.executable, "scripts/train.py", "--config", "config/grpo.py:toy_t2is"]
            + [f"--config.{name}={value}" for name, value in given.items()],
            cwd=tree / "PaCo-GRPO",
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.process.send_signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> tuple[float, float] | None:
        """Run for ``seconds`` or to the end of the epoch; then its CPU and wall-clock seconds, else None.

        Raises:
            RuntimeError: The process has ended.
        """
        epochs, started = self._epochs(), time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        while time.perf_counter() - started < seconds and self._epochs() == epochs and self.process.poll() is None:
            time.sleep(POLL)
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.label} ended with status {self.process.returncode}:\n{self._log.read_text()[-2000:]}"
            )
        self.process.send_signal(signal.SIGSTOP)
        self._wall += time.perf_counter() - started
        if self._epochs() == epochs:
            return None
        before, self._cpu = self._cpu, self._cpu_seconds()
        took, self._wall = (self._cpu - before, self._wall), 0.0
        return took

    def _epochs(self) -> int:
        lines = self.rows.read_text().splitlines() if self.rows.is_file() else []
        return sum('"phase": "train"' in line for line in lines)

    def _cpu_seconds(self) -> float:
        """Of all threads since the process began."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_turns(trainers: Sequence[Trainer], rounds: int) -> list[dict[str, tuple[float, float]]]:
    """CPU and wall-clock seconds of one epoch of every trainer, ``rounds`` times; the first epochs are not counted."""
    found = []
    for index in range(1 + rounds):
        took: dict[str, tuple[float, float]] = {}
        while len(took) < len(trainers):
            for trainer in trainers:
                if trainer.label not in took and (seconds := trainer.turn(SLICE)):
                    took[trainer.label] = seconds
        if index:
            found.append({trainer.label: took[trainer.label] for trainer in trainers})  # the base first
            print(", ".join(f"{name}: {cpu:.1f} s" for name, (cpu, _) in took.items()), file=sys.stderr, flush=True)
    return found


def ratio_table(found: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    """A Markdown table of ratios to the first trainer."""
    labels, rows = list(found[0]), []
    for label in labels:
        cells = [f"{statistics.median(took[label][0] for took in found):.1f}"]
        for clock in (0, 1):
            ratios = sorted(took[label][clock] / took[labels[0]][clock] for took in found)
            cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})")
        rows.append([f"`{label}`", *(cells if label != labels[0] else [cells[0], "1", "1"])])
    return table(["", "CPU seconds an epoch", "ratio, CPU time", "ratio, wall clock"], rows)


@contextmanager
def worktree(commit: str, folder: Path, repository: Path) -> Iterator[Path]:
    """``commit`` of ``repository`` checked out in ``folder``."""
    git = ["git", "-C", str(repository), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare(base: str, variants: Sequence[str], rounds: int, prompts: int = 8, repository: Path = ROOT) -> str:
    """The table of ``ratio_table``, for the commit that is checked out in ``repository``."""
    with tempfile.TemporaryDirectory(prefix="paco-commits-") as temporary:
        folder = Path(temporary)
        model = repository / "quickstart" / "models" / "flux"
        shared = {
            "pretrained.model": model,
            "dataset": folder / "prompts",
            "sample.unique_sample_num_per_epoch": prompts,
        }
        write_prompts(folder / "prompts", prompts * (rounds + 2))
        trainers: list[Trainer] = []
        with worktree(base, folder / "base", repository) as old, worktree("HEAD", folder / "new", repository) as new:
            try:
                trainers.append(Trainer(old, folder / "runs-base", base, shared))
                for index, variant in enumerate(variants):
                    options = dict(part.split("=", 1) for part in shlex.split(variant))
                    label = variant or "as configured"
                    trainers.append(Trainer(new, folder / f"runs-{index}", label, shared | options))
                return ratio_table(take_turns(trainers, rounds))
            finally:
                for trainer in trainers:
                    trainer.process.kill()
                    trainer.process.wait()


def write_prompts(folder: Path, count: int) -> None:
    """Texts of which none occurs twice, so that each is encoded."""
    folder.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": f"four panels of a character, story {i}"}) for i in range(count)]
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(lines) + "\n")


def main(given: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--base", required=True, metavar="COMMIT", help="what the commit that is checked out is compared with"
    )
    made.add_argument("--variant", action="append", metavar="OPTIONS", help='see above; may be repeated (default: "")')
    made.add_argument("--prompts", type=int, default=8, help="of an epoch, 8 images each; 2: a quarter of all work")
    made.add_argument("--rounds", type=int, default=5, help="epochs of each, after one that is not counted")
    arguments = made.parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the trainers
    try:
        print(compare(arguments.base, arguments.variant or [""], arguments.rounds, arguments.prompts))
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
