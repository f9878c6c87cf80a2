"""What follows from the options and the real number of processes."""

import math
from dataclasses import dataclass

import torch

from paco_grpo.options import RunOptions


@dataclass(frozen=True)
class Plan:
    """Derived numbers of a run."""

    num_processes: int  # from the launcher
    prompts: int  # m, unique prompts an epoch over all processes, possibly raised
    images_per_prompt: int  # k
    samples: int  # m·k, images an epoch over all processes
    samples_per_process: int  # images an epoch on each process
    sample_batch_size: int  # images per rollout batch on each process
    rollout_batches: int  # an epoch on each process, when all images have one size
    gradient_steps: int  # optimizer steps in one pass over the epoch's samples
    notes: tuple[str, ...] = ()  # where the plan departs from the options, for the log


def make_plan(options: RunOptions, num_processes: int, gradient_steps: int) -> Plan:
    """Derive the plan. m is raised until m·k divides evenly over processes and batches (docs/method.md §4).

    A batch larger than a process's share is first reduced to it, so that more processes need not mean more prompts.
    ``gradient_steps`` is the objective's default.
    """
    sample, train = options.sample, options.train
    wanted, k = sample.unique_sample_num_per_epoch, sample.num_images_per_prompt
    batch = min(sample.batch_size, max(1, wanted * k // num_processes))
    unit = num_processes * batch
    step = unit // math.gcd(unit, k)
    prompts = math.ceil(wanted / step) * step
    share = prompts * k // num_processes
    notes = []
    if prompts != wanted:
        notes.append(
            f"sample.unique_sample_num_per_epoch raised from {wanted} to {prompts}, so that {k} images each divide "
            f"evenly over {num_processes} processes in batches of {batch}"
        )
    return Plan(
        num_processes=num_processes,
        prompts=prompts,
        images_per_prompt=k,
        samples=prompts * k,
        samples_per_process=share,
        sample_batch_size=batch,
        rollout_batches=share // batch,
        gradient_steps=train.gradient_step_per_epoch or gradient_steps,
        notes=tuple(notes),
    )


def merges_lora(options: RunOptions, device: torch.device) -> bool:
    """Whether steps without noise run with the LoRA merged into the base weights.

    bfloat16 would round most of a small update away; on a GPU, TF32 rounds more and a copy of the weights takes memory.
    """
    exact = (
        options.mixed_precision == "no"
        and device.type == "cpu"
        and options.pretrained.quantize is None
    )
    return exact and options.use_lora
