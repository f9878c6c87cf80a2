"""The same two epochs under every engine that can run on this machine, against one process: the number of GPUs and the
way in which weights are spread must change the speed, not the mathematics.

    python benchmarks/compare_engines.py                                         # tiny random weights
    python benchmarks/compare_engines.py --config config/grpo.py:t2is --config.pretrained.model=/models/FLUX.1-dev \\
        --config.train.reward_fn='{"jpeg_compressibility": 1}'                   # a configuration of yours, a GPU machine

Needs nobody; without GPUs it runs on the CPU over gloo. Prints a table and writes --output; --folder keeps the runs.
Exit status: 0 = everything that ran agrees, 1 = something differs or failed. What cannot run is named with the reason.

The largest differences to one process are given: of the advantages; of an epoch's loss, as a share of it or of the mean
|advantage|, whichever is larger (the first loss of PPO is the mean advantage, 0 but for rounding); and of the weights, as
a share of the way they went in the second epoch. Adam's epsilon is 1e-2 here: with a tiny one the first step is the
sign of the gradient, which turns rounding near 0 into differences of full size.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from measuring import machine
from measuring.markdown import compare_engines

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
# advantages come from scores of 8-bit images, in which rounding can turn a pixel
TOLERANCES = {"advantages": 1e-2, "loss": 1e-2, "weights": 2e-2}


@dataclass(frozen=True)
class Engine:
    """One way to run: by which accelerate configuration, and with which option where there is none for it."""

    name: str
    processes: int
    accelerate: str | None = None
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name}-{self.processes}"


def engines(gpus: int) -> list[Engine]:
    """The reference first."""
    found = [Engine("replicated", count) for count in (1, 2, 4)]
    for count in (2, 4):
        by_accelerate = ("fsdp2.yaml",) if gpus else (None, ("--config.train.sharding=fsdp2",))
        found.append(Engine("fsdp2", count, *by_accelerate))
    return found + [Engine(f"zero{stage}", 2, f"deepspeed_zero{stage}.yaml") for stage in (1, 2, 3)]


def why_not(engine: Engine, gpus: int) -> str | None:
    """What keeps an engine from running here, if anything."""
    if engine.name == "zero3":
        return "this trainer does not drive ZeRO-3; fsdp2 divides the weights"
    if engine.name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install 'paco-grpo[deepspeed]'"
    if gpus and engine.processes > gpus:
        return f"needs {engine.processes} GPUs, {gpus} visible"
    return None


# --- one run ----------------------------------------------------------------------------------------------------------


def worker(arguments: list[str]) -> int:
    """In each process of a run: train, and note every epoch's advantages."""
    from paco_grpo.training.configuration import read_config
    from paco_grpo.training.setup import build_run
    from paco_grpo.training.trainer import Trainer

    config, _ = read_config(arguments, ROOT / "config" / "base.py")
    trainer = Trainer(build_run(config))
    run, noted, train = trainer.run, [], trainer.run.updater.run

    def note_then_train(rollouts, positions, advantages, kept, epoch):
        noted.append([float(a) if k else None for a, k in zip(advantages, kept, strict=True)])
        return train(rollouts, positions, advantages, kept, epoch)

    run.updater.run = note_then_train
    is_main = run.accelerator.is_main_process
    trainer.train()
    if is_main:
        (run.folder / "advantages.json").write_text(json.dumps({"engine": run.engine.name, "advantages": noted}))
    return 0


def launch(engine: Engine, options: list[str], folder: Path, gpus: int) -> tuple[Path, float]:
    """Run it; its folder and seconds.

    Raises:
        RuntimeError: It failed; the message has the end of its log.
    """
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if not gpus:
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        if not engine.accelerate:  # told to use a CPU, accelerate leaves DeepSpeed out
            environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable]
    if engine.accelerate:
        config = ROOT / "scripts" / "accelerate_configs" / engine.accelerate
        command += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--num_processes", str(engine.processes)]
    elif engine.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(engine.processes)]
    command += [__file__, "--worker", *options, *engine.options, f"--config.save_dir={folder}"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    with (folder / "log").open("w") as log:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
    if status:
        raise RuntimeError(f"exit status {status}: …{(folder / 'log').read_text()[-1500:]}")
    return folder / "run", time.perf_counter() - started


# --- comparison -------------------------------------------------------------------------------------------------------


def outcome(run: Path) -> dict:
    """Advantages and losses of each epoch, and the weights after each."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = [load_file(path / "state" / "trainable.safetensors") for path in sorted((run / "checkpoints").iterdir())]
    return {
        **json.loads((run / "advantages.json").read_text()),
        "loss": [row["train/loss"] for row in rows if row["phase"] == "train"],
        "seconds": [row["time/epoch_s"] for row in rows if row["phase"] == "train"],
        "weights": weights,
    }


def differences(reference: dict, other: dict) -> dict[str, float]:
    """Largest differences, as the module says; infinite where other samples were left out."""
    pairs = [
        pair
        for ours, theirs in zip(reference["advantages"], other["advantages"], strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    if any((a is None) != (b is None) for a, b in pairs):
        return dict.fromkeys(TOLERANCES, float("inf"))
    before, after = reference["weights"]
    way = max(float((after[key] - before[key]).abs().max()) for key in after)
    apart = max(float((after[key] - other["weights"][1][key]).abs().max()) for key in after)
    losses = zip(reference["loss"], other["loss"], reference["advantages"], strict=True)
    return {
        "advantages": max(abs(a - b) for a, b in pairs if a is not None),
        "loss": max(abs(a - b) / max(abs(a), _mean_size(advantages)) for a, b, advantages in losses),
        "weights": apart / way,
    }


def _mean_size(advantages: list[float | None]) -> float:
    return statistics.fmean([abs(a) for a in advantages if a is not None] or [0.0])


def compare(objective: str, options: list[str], folder: Path, gpus: int) -> list[dict]:
    """A row for every engine."""
    rows, reference = [], None
    options = [*options, f"--config.train.loss_type={objective}"]
    for engine in engines(gpus):
        row = {"objective": objective, "engine": engine.label, "ran": False, "agrees": None}
        rows.append(row)
        if reason := why_not(engine, gpus):
            row["not_run"] = reason
        else:
            print(f"{objective} {engine.label} …", file=sys.stderr, flush=True)
            try:
                run, row["seconds"] = launch(engine, options, folder / objective / engine.label, gpus)
                result = outcome(run)
                reference = reference or result
                if not result["engine"].endswith(engine.name):
                    raise RuntimeError(f"it ran as {result['engine']}")
                row |= {"ran": True, "loss": result["loss"]}
                row["seconds_an_epoch"] = result["seconds"]
                row["differences"] = differences(reference, result)
                row["agrees"] = all(row["differences"][name] <= limit for name, limit in TOLERANCES.items())
            except RuntimeError as error:
                row |= {"agrees": False, "failed": str(error)}
                if reference is None:
                    return rows
    return rows


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments[:1] == ["--worker"]:
        return worker(arguments[1:])
    own, overrides = parser().parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as temporary:
        report = measure(own, overrides, (own.folder or Path(temporary)).absolute())
    machine.write(own.output, report)
    print(f"{compare_engines(report)}\n{own.output}")
    return int(any(row["agrees"] is False for row in report["rows"]))


def measure(own: argparse.Namespace, overrides: list[str], folder: Path) -> dict:
    """The report; runs are left in ``folder``."""
    settings, gpus = dict(SETTINGS), torch.cuda.device_count()
    if own.config is None:
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny_policies import build
        from tiny_run import write_prompts

        settings |= TINY | {"pretrained.model": str(build("flux", folder / "model"))}
        settings["dataset"] = str(write_prompts(folder / "prompts"))
    options = ["--config", own.config or "config/grpo.py:toy_t2is"]
    options += [f"--config.{key}={value}" for key, value in settings.items()] + overrides
    rows = [row for objective in own.objectives.split(",") for row in compare(objective, options, folder, gpus)]
    return machine.report("compare_engines", {"options": options, "tolerances": TOLERANCES}, rows=rows)


def parser() -> argparse.ArgumentParser:
    """The command line, but for the options of the configuration."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", help="a configuration (FILE:NAME or config.yaml); default: toy_t2is on tiny weights")
    made.add_argument("--objectives", default="ppo,guard_grpo,nft", help="default: ppo,guard_grpo,nft")
    made.add_argument("--folder", type=Path, help="of the runs (default: one that is removed)")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/compare_engines.json"))
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
