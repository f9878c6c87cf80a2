"""The same two epochs under every engine that can run here, compared with one process: engines must change only speed.

    python benchmarks/compare_engines.py                       # tiny random weights; without GPUs over gloo
    python benchmarks/compare_engines.py --config config/grpo.py:t2is --config.pretrained.model=/models/FLUX.1-dev \\
        --config.train.reward_fn='{"jpeg_compressibility": 1}'  # your own configuration on a machine with GPUs

Runs scripts/train.py and compares, with the largest difference to one process: mean rewards (as a share of their standard
deviation), losses (as a share of the loss, or absolute where it is below 1; advantages have unit size), and weights (as a
share of their change in the second epoch). Engines that cannot run are listed with the reason. Exit status: 0 = everything
that ran agrees, 1 = something differs or failed. --folder keeps the runs.

Adam's epsilon is 1e-2 here: with a tiny one, Adam's first step is the sign of the gradient, which turns rounding near 0
into differences of full size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from measuring import report

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "num_epochs": 2, "max_train_minutes": None, "save_freq": 1, "eval_freq": 0, "test.at_start": False,
    "test.num_images": 4, "logging_platform": "none", "train.adam_epsilon": 1e-2, "train.learning_rate": 1e-2,
    "sample.num_images_per_prompt": 8, "sample.unique_sample_num_per_epoch": 2, "sample.batch_size": 4,
    "mixed_precision": "no", "allow_tf32": False, "run_name": "run",
}  # fmt: skip
TINY = {
    "sample.num_steps": 3, "train.resolution": 16, "train.lora_rank": 8, "test.resolution": 16, "test.num_steps": 2,
    "max_sequence_length": 16, "item_size": "aspect", "num_threads": 1, "sample.same_latent": False,
    "train.batch_size": 3, "train.reward_fn": "{'tiny_run:brightness': 1.0}", "train.reward_fn_kwargs": "{}",
    "test.reward_fn": "", "test.reward_fn_kwargs": "{}",
}  # fmt: skip
# Rewards score 8-bit images, in which rounding can change a pixel.
TOLERANCES = {"rewards": 1e-2, "loss": 1e-2, "weights": 2e-2}


@dataclass(frozen=True)
class Engine:
    """One way to run: an accelerate configuration, or an option where accelerate has none."""

    name: str
    processes: int
    accelerate: str | None = None
    options: tuple[str, ...] = ()

    def reason_against(self, gpus: int) -> str | None:
        """Why it cannot run on this machine."""
        if gpus and self.processes > gpus:
            return f"needs {self.processes} GPUs, {gpus} visible"
        return None

    def train(self, options: list[str], folder: Path, gpus: int) -> Path:
        """Run scripts/train.py; returns the folder of the run.

        Raises:
            RuntimeError: It failed; the message has the end of its log.
        """
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        if not gpus:
            environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable]
        if self.accelerate:
            config = ROOT / "scripts" / "accelerate_configs" / self.accelerate
            command += ["-m", "accelerate.commands.launch", f"--config_file={config}", f"--num_processes={self.processes}"]
        elif self.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        command += [str(ROOT / "scripts" / "train.py"), *options, *self.options, f"--config.save_dir={folder}"]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / "log").open("w") as log:
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
        if status:
            raise RuntimeError(f"exit status {status}: …{(folder / 'log').read_text()[-1500:]}")
        return folder / "run"


def engines(gpus: int) -> list[Engine]:
    """All engines; the reference, one process, comes first."""
    found = [Engine("replicated", count) for count in (1, 2, 4)]
    for count in (2, 4):
        by_accelerate = ("fsdp2.yaml",) if gpus else (None, ("--config.train.sharding=fsdp2",))
        found.append(Engine("fsdp2", count, *by_accelerate))
    return found


def outcome(run: Path) -> dict[str, Any]:
    """Engine, rewards and loss of each epoch, and the weights after each."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["phase"] == "train"]
    names = [key.removesuffix("_mean") for key in rows[0] if key.startswith("reward/") and key.endswith("_mean")]
    checkpoints = sorted((run / "checkpoints").iterdir())
    return {
        "engine": json.loads((run / "plan.json").read_text())["engine"],
        "rewards": [{name: (row[f"{name}_mean"], row[f"{name}_std"]) for name in names} for row in rows],
        "loss": [row["train/loss"] for row in rows],
        "weights": [load_file(path / "state" / "trainable.safetensors") for path in checkpoints],
    }


def differences(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Largest differences by kind; see the top of the file."""
    before, after = reference["weights"]
    change = max(float((after[key] - before[key]).abs().max()) for key in after)
    apart = max(float((after[key] - other["weights"][1][key]).abs().max()) for key in after)
    rewards = [
        abs(mean - theirs[name][0]) / (std or 1.0)
        for ours, theirs in zip(reference["rewards"], other["rewards"], strict=True)
        for name, (mean, std) in ours.items()
    ]
    losses = [abs(a - b) / max(abs(a), 1.0) for a, b in zip(reference["loss"], other["loss"], strict=True)]
    return {"rewards": max(rewards), "loss": max(losses), "weights": apart / change}


def compare(objective: str, options: list[str], folder: Path, gpus: int) -> list[dict[str, Any]]:
    """A row for every engine."""
    rows, reference = [], None
    options = [*options, f"--config.train.loss_type={objective}"]
    for engine in engines(gpus):
        label = f"{engine.name}-{engine.processes}"
        row: dict[str, Any] = {"objective": objective, "engine": label, "agrees": None}
        rows.append(row)
        if reason := engine.reason_against(gpus):
            row["note"] = f"did not run: {reason}"
            continue
        print(f"{objective} {label} …", file=sys.stderr, flush=True)
        try:
            started = time.perf_counter()
            result = outcome(engine.train(options, folder / objective / label, gpus))
            row["seconds"] = time.perf_counter() - started
            if not result["engine"].endswith(engine.name):  # accelerate may fall back silently
                raise RuntimeError(f"it ran as {result['engine']}")
            reference = reference or result
            row["differences"] = differences(reference, result)
            row["agrees"] = all(row["differences"][name] <= limit for name, limit in TOLERANCES.items())
            row["note"] = "agrees" if row["agrees"] else "**differs**"
        except RuntimeError as error:
            row |= {"agrees": False, "note": f"**failed**: {str(error).splitlines()[-1]}", "error": str(error)}
            if reference is None:
                break
    return rows


def main(given: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments, overrides = parser().parse_known_args(given)
    settings, gpus = dict(SETTINGS), torch.cuda.device_count()
    with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        if arguments.config is None:
            sys.path.insert(0, str(ROOT / "tests"))
            from tiny_policies import build
            from tiny_run import write_prompts

            settings |= TINY | {"pretrained.model": str(build("flux", folder / "model"))}
            settings["dataset"] = str(write_prompts(folder / "prompts"))
        options = ["--config", arguments.config or "config/grpo.py:toy_t2is"]
        options += [f"--config.{key}={value}" for key, value in settings.items()] + overrides
        rows = [row for name in arguments.objectives.split(",") for row in compare(name, options, folder, gpus)]
    lines = []
    for row in rows:
        cells = [report.number(row.get("differences", {}).get(name), ".1e") for name in TOLERANCES]
        lines.append([row["objective"], row["engine"], *cells, row["note"]])
    text = f"Largest differences to one process. Tolerances: {TOLERANCES}.\n\n"
    text += report.table(["objective", "engine", *TOLERANCES, ""], lines)
    made = report.header("compare_engines", {"options": options, "tolerances": TOLERANCES}) | {"rows": rows}
    report.write(arguments.output, made, text)
    print(f"{text}\n{arguments.output}")
    return int(any(row["agrees"] is False for row in rows))


def parser() -> argparse.ArgumentParser:
    """The command line, without the options of the configuration."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", help="a configuration (FILE:NAME or config.yaml); default: toy_t2is on tiny weights")
    made.add_argument("--objectives", default="ppo,guard_grpo,nft", help="default: ppo,guard_grpo,nft")
    made.add_argument("--folder", type=Path, help="keep the runs here")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/compare_engines.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
