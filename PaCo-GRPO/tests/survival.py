"""Runs in separate processes, disturbed at a chosen moment: killed, asked to stop, out of disk, or spoiled.

The processes are forked from a server that has everything imported, so a run costs its own work and no more.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from tiny_run import brightness, overrides_for, tiny_options

import paco_grpo.policies.flux  # imported in the server, not in each run
from paco_grpo.checkpoint import files as ckpt
from paco_grpo.rewards.queue import JournaledReward
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer, TrainingStopped
from paco_grpo.training.update import Updater

RUN = {
    "num_epochs": 3, "save_freq": 1, "train__gradient_step_per_epoch": 2, "sample__num_images_per_prompt": 8,
    "train__reward_fn": "{'survival:noted': 1}",
}  # fmt: skip
FAILED, STOPPED = 2, 3
# So that the server finds this module.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def noted(file: str = ""):
    """brightness; the number of images of each call goes to ``file``."""
    score = brightness()

    def note_then_score(images, items):
        with Path(file).open("a") as out:
            out.write(f"{len(images)}\n")
        return score(images, items)

    return note_then_score


# --- harm -------------------------------------------------------------------------------------------------------------


def kill(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(*_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fill_disk(*_) -> None:
    """From now on no file can grow beyond 4 KiB: the system refuses the write, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def spoil(updater, rollouts, *_) -> None:
    """The old log-probabilities are lost."""
    for part in rollouts.parts:
        for step in part.noise_steps:
            step.log_prob.fill_(float("nan"))


@dataclass(frozen=True)
class Harm:
    """``action`` at call number ``at_call`` of a method, in process ``rank`` alone."""

    method: str
    at_call: int
    action: str = "kill"
    after: bool = False
    rank: int = 0


_METHODS = {
    "decode": (paco_grpo.policies.flux.FluxPolicy, "decode"),
    "score": (JournaledReward, "__call__"),
    "backward": (Updater, "_backward"),
    "update": (Updater, "_optimizer_step"),
    "write": (ckpt, "save_tensors"),
    "begin": (ckpt.CheckpointWriter, "begin"),
    "commit": (ckpt.CheckpointWriter, "commit"),
}


@contextlib.contextmanager
def done(harm: Harm):
    """Inside, ``harm`` waits for its moment."""
    owner, name = _METHODS[harm.method]
    original, calls = getattr(owner, name), []

    def method(*arguments, **keywords):
        calls.append(1)
        now = len(calls) == harm.at_call
        if now and not harm.after:
            globals()[harm.action](*arguments)
        result = original(*arguments, **keywords)
        if now and harm.after:
            globals()[harm.action](*arguments)
        return result

    with mock.patch.object(owner, name, method):
        yield


def _main(
    rank: int, processes: int, port: int, flux: Path, folder: Path, changes: dict, harm: Harm | None, watch, before
) -> None:
    sys.stderr = (folder / f"stderr_{rank}").open("w")
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
    if before:
        before()
    try:
        with done(harm) if harm and harm.rank == rank else contextlib.nullcontext():
            trainer = Trainer(build_run(tiny_options(flux, folder, **changes)))
            if watch:
                watch(trainer, folder)
            trainer.fit()
    except TrainingStopped as stopped:
        (folder / f"said_{rank}").write_text(str(stopped))
        sys.exit(STOPPED)
    except (ckpt.CheckpointError, OSError) as error:
        (folder / f"said_{rank}").write_text(str(error))
        sys.exit(FAILED)


def run(
    flux: Path,
    folder: Path,
    processes: int = 1,
    harm: Harm | None = None,
    watch: Callable | None = None,
    before: Callable | None = None,
    **changes,
) -> list[int]:
    """Exit status of each process; when one is killed, so are the others, as by a launcher.

    ``before()`` is called in each process before anything else, ``watch(trainer, folder)`` before training; both must be
    in modules that they can import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overrides_for(flux, folder)  # writes the prompts
    kwargs = {"survival:noted": {"file": str(folder / "noted")}}
    changes = RUN | {"train__reward_fn_kwargs": repr(kwargs)} | changes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["survival"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        context.Process(target=_main, args=(rank, processes, port, flux, folder, changes, harm, watch, before))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    multiprocessing.connection.wait([process.sentinel for process in started])
    if any(process.exitcode == -signal.SIGKILL for process in started):
        for process in started:
            process.kill()
    for process in started:
        process.join(240)
    return [process.exitcode for process in started]


# --- what came of it ---------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[str]:
    """Everything in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").iterdir())


def state(folder: Path, epoch: int) -> dict[str, bytes]:
    """Every file of a checkpoint's state, except how long things took."""
    files = (folder / "runs" / "run" / "checkpoints" / ckpt.checkpoint_name(epoch) / "state").iterdir()
    return {path.name: path.read_bytes() for path in files if path.name != "trainer.json"}


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without times."""
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("time", "train_time") and not k.startswith("time/")}
        for line in lines
    ]


def images_scored(folder: Path) -> int:
    """Images that the reward was asked for, over all processes and runs."""
    return int(np.sum([int(line) for line in (folder / "noted").read_text().splitlines()]))


def said(folder: Path, rank: int = 0) -> str:
    """The message with which a process ended."""
    return (folder / f"said_{rank}").read_text()
