"""Tiny runs of one or more processes, observed from inside or hit by a fault of one of them.

The processes are forked from a server that has everything imported, so a run costs little more than
its own work.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from fakes import distributed_environment, free_port
from safetensors.torch import load_file
from tiny_run import overrides_for, tiny_options
from torch.distributed.tensor import DTensor

from paco_grpo import distributed
from paco_grpo.commands import start_logging
from paco_grpo.objectives import Objective
from paco_grpo.objectives.dgpo import Dgpo
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.training import checkpoints as ckpt
from paco_grpo.training.build import build_run
from paco_grpo.training.sample import Sampler
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer
from paco_grpo.training.update import Updater
from paco_judge.errors import UserError

RUN = {
    "num_epochs": 3,
    "save_freq": 1,
    "train__gradient_step_per_epoch": 2,
    "sample__num_images_per_prompt": 8,
    "sample__reward_batch_size": 4,
}
# With a tiny epsilon of Adam, the first step is the gradient's sign, and rounding near 0 shows at
# full size. Weights move by about 1e-4 a step.
COMPARABLE = {
    "num_epochs": 2,
    "save_freq": 2,
    "train__adam_epsilon": 1e-2,
    "train__learning_rate": 1e-2,
    "test__num_images": 5,
    "train__max_missing_reward_fraction": 1,
}
TOLERANCE = 3e-6
STOPPED = 3
# So that the server finds this module.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)


def terminate(*_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def lose_log_probs(updater, rollouts, *_) -> None:
    for sample in rollouts.samples:
        for step in sample.noise_steps:
            step.log_prob.fill_(float("nan"))


def out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError("GPU 1 is full. Tried to allocate 7 GiB.")


def read_bad_image(*_) -> None:
    raise UserError("train_metadata.jsonl: row 7 cannot be read")


# Name → what process 1 does before which call of a method of its: class, method, call, action.
FAULTS = {
    "signal": (FluxPolicy, "decode", 3, terminate),
    "not finite": (Updater, "_micro_batches", 2, lose_log_probs),
    "old log-probability": (Objective, "first_deviation", 1, out_of_memory),
    "bad image": (Sampler, "load", 2, read_bad_image),
    "group weights": (Dgpo, "measure", 1, out_of_memory),
}


def injected(fault: str):
    owner, name, at_call, action = FAULTS[fault]
    original = getattr(owner, name)
    calls = []

    def method(*arguments, **keywords):
        calls.append(1)
        if len(calls) == at_call:
            action(*arguments)
        return original(*arguments, **keywords)

    return mock.patch.object(owner, name, method)


def _main(rank: int, placement: dict, flux: Path, folder: Path, changes: dict, fault: str) -> None:
    sys.stderr = (folder / f"stderr_{rank}").open("w", buffering=1)
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    start_logging()
    timeout_s = changes.pop("timeout_s", None)
    if timeout_s:
        distributed.TIMEOUT = timedelta(seconds=timeout_s)
    if placement:
        os.environ |= distributed_environment(rank, **placement)
    try:
        with injected(fault) if fault and rank == 1 else contextlib.nullcontext():
            trainer = Trainer(build_run(tiny_options(flux, folder, **changes)))
            observe(trainer, folder)
            trainer.fit()
    except TrainingStopped as stopped:
        (folder / f"message_{rank}").write_text(str(stopped))
        sys.exit(STOPPED)


def run(
    flux: Path,
    folder: Path,
    processes: int = 1,
    fault: str = "",
    machines: int = 1,
    meanwhile: Callable[[Sequence[multiprocessing.Process]], None] = lambda started: None,
    **changes,
) -> list[int]:
    """Exit status of each process.

    ``meanwhile`` gets the processes when they are started. ``timeout_s``: how long one waits for
    another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overrides_for(flux, folder)  # writes the prompts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_runs"])
    placement = {}
    if processes > 1:
        placement = {"processes": processes, "port": free_port(), "machines": machines}
    more = (placement, flux, folder, RUN | changes, fault)
    started = [context.Process(target=_main, args=(rank, *more)) for rank in range(processes)]
    for process in started:
        process.start()
    try:
        meanwhile(started)
    except Exception:
        for process in started:
            process.kill()
        raise
    for process in started:
        process.join(240)
    return [process.exitcode for process in started]


def run_to_end(flux: Path, folder: Path, processes: int = 1, **options) -> None:
    status = run(flux, folder, processes, **options)
    assert status == [0] * processes, [path.read_text()[-2000:] for path in folder.glob("stderr_*")]


def observe(trainer, folder: Path) -> None:
    updater = trainer.run.updater
    rank = trainer.accelerator.process_index
    named = list(trainer.state.policy.transformer.named_parameters())
    base = [p for name, p in named if "lora_" not in name]
    seen = {
        "base": sum(p.numel() for p in base),
        "base_here": sum(_local(p).numel() for p in base),
        "sharded": sorted({isinstance(p, DTensor) for p in base}),
        "lora_whole": not any(isinstance(p, DTensor) for name, p in named if "lora_" in name),
        "advantages": [],
    }
    original = updater.update

    def update(rollouts, advantages, kept, epoch, should_stop):
        seen["advantages"].append(np.where(kept, advantages, 0).tolist())
        result = original(rollouts, advantages, kept, epoch, should_stop)
        entries = updater.state.optimizer.state.values()
        seen["optimizer_here"] = sum(_local(entry["exp_avg"]).numel() for entry in entries)
        (folder / f"observed_{rank}.json").write_text(json.dumps(seen))
        return result

    updater.update = update


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def observed(folder: Path, rank: int = 0) -> dict:
    return json.loads((folder / f"observed_{rank}.json").read_text())


def message(folder: Path, rank: int = 0) -> str:
    return (folder / f"message_{rank}").read_text()


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").iterdir())


def _state_folder(folder: Path, epoch: int) -> Path:
    return folder / "runs" / "run" / "checkpoints" / ckpt.checkpoint_name(epoch) / "state"


def state(folder: Path, epoch: int) -> dict[str, bytes]:
    """Every file of a checkpoint's state, except how long things took."""
    files = _state_folder(folder, epoch).iterdir()
    return {path.name: path.read_bytes() for path in files if path.suffix != ".json"}


def weights(folder: Path, name: str = "trainable") -> dict[str, torch.Tensor]:
    return load_file(_state_folder(folder, 2) / f"{name}.safetensors")


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without times."""
    without_times = []
    for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = [name for name in row if name.split("/")[0] not in ("time", "train_time")]
        without_times.append({name: row[name] for name in names})
    return without_times


def evaluated_seeds(folder: Path) -> list[int]:
    file = folder / "runs" / "run" / "eval" / "epoch_0002" / "eval_data.jsonl"
    return [json.loads(line)["seed"] for line in file.read_text().splitlines()]


def assert_same_training(one: Path, other: Path) -> None:
    """Advantages, numbers of every epoch and evaluation, and weights, which did change."""
    # Rounding may turn a pixel of an 8-bit image, and with it an advantage by up to a hundredth.
    advantages = [observed(folder)["advantages"] for folder in (one, other)]
    np.testing.assert_allclose(*advantages, rtol=0, atol=2e-2)
    compared = ("reward/", "advantage/", "train/loss", "train/grad", "eval/", "health/")
    for a, b in zip(rows(one), rows(other), strict=True):
        for key in ("phase", "epoch", "step"):
            assert a[key] == b[key]
        for key, value in a.items():
            if key.startswith(compared):
                assert b[key] == pytest.approx(value, rel=2e-3, abs=1e-6), key
    seeds = evaluated_seeds(one)
    assert seeds == evaluated_seeds(other) and len(seeds) == 5
    for name in ("trainable", "ema"):
        torch.testing.assert_close(weights(other, name), weights(one, name), rtol=0, atol=TOLERANCE)
    pairs = zip(weights(one).values(), weights(one, "ema").values(), strict=True)
    assert max(float((weight - average).abs().max()) for weight, average in pairs) > 10 * TOLERANCE
