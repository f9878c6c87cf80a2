"""What follows from the configuration and the real number of processes; computed after all overrides."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ml_collections import ConfigDict


@dataclass(frozen=True)
class Plan:
    """Derived numbers of a run.

    Attributes:
        num_processes: From the launcher.
        prompts: m, unique prompts an epoch over all processes, possibly raised.
        images_per_prompt: k.
        samples: m·k, images an epoch over all processes.
        samples_per_process: Images an epoch on each process.
        sample_batch_size: Images per rollout batch on each process.
        rollout_batches: Rollout batches an epoch on each process, when all images have one size.
        gradient_steps: Optimizer steps in one pass over the epoch's samples.
        samples_per_step: Images (over all processes) behind one optimizer step, before missing ones are left out.
        train_batch_size: Images per training forward on each process.
        accumulation: Training micro-batches per optimizer step on each process (per trained noise step).
        notes: What was changed against the configuration, for the log.
    """

    num_processes: int
    prompts: int
    images_per_prompt: int
    samples: int
    samples_per_process: int
    sample_batch_size: int
    rollout_batches: int
    gradient_steps: int
    samples_per_step: int
    train_batch_size: int
    accumulation: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """Plain values, for saving."""
        return dataclasses.asdict(self)


def gradient_steps(config: ConfigDict) -> int:
    """Optimizer steps per pass over an epoch's samples (method §6: one for nft, else two)."""
    chosen = config.train.gradient_step_per_epoch
    return chosen if chosen is not None else (1 if config.train.loss_type == "nft" else 2)


def make_plan(config: ConfigDict, num_processes: int, batch_size: int | None = None) -> Plan:
    """Derive the plan. m is raised until m·k divides evenly over processes and batches (method §4).

    A batch larger than a process's share of the epoch is first reduced to that share, so that adding processes does
    not change how many prompts an epoch has where it need not.

    Args:
        config: The run's.
        num_processes: From the launcher.
        batch_size: Images per sampling forward; None = ``config.sample.batch_size``.
    """
    asked = config.sample.batch_size if batch_size is None else batch_size
    wanted, k = config.sample.unique_sample_num_per_epoch, config.sample.num_images_per_prompt
    batch = min(asked, max(1, wanted * k // num_processes))
    unit = num_processes * batch
    step = unit // math.gcd(unit, k)
    prompts = math.ceil(wanted / step) * step
    samples = prompts * k
    share = samples // num_processes
    steps = gradient_steps(config)
    notes = []
    if batch != asked:
        notes.append(f"sample.batch_size {asked} exceeds a process's share; {batch} is used")
    if prompts != wanted:
        notes.append(
            f"sample.unique_sample_num_per_epoch raised from {wanted} to {prompts}, so that {k} images each divide "
            f"evenly over {num_processes} processes in batches of {batch}"
        )
    per_step = math.ceil(samples / steps)
    return Plan(
        num_processes=num_processes,
        prompts=prompts,
        images_per_prompt=k,
        samples=samples,
        samples_per_process=share,
        sample_batch_size=batch,
        rollout_batches=share // batch,
        gradient_steps=steps,
        samples_per_step=per_step,
        train_batch_size=config.train.batch_size,
        accumulation=math.ceil(per_step / num_processes / config.train.batch_size),
        notes=tuple(notes),
    )
