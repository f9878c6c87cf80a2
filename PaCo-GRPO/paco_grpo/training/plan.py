"""What follows from the options, the model and the real number of processes; computed after all overrides."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from paco_grpo.distributed.processes import main_decides
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import Policy
from paco_grpo.sampling.denoise import Tail, rollout
from paco_grpo.sampling.images import at_size
from paco_grpo.sampling.schedule import sample_noise_steps
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.85  # of the device's memory that may be used
_MOST_IMAGES = 32  # more images make no forward of a large model more efficient
_IMAGES_ON_CPU = 16  # main memory is shared with other programs, and batches matter less


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
    samples_per_step: int  # images over all processes behind one optimizer step, before missing ones are left out
    train_batch_size: int  # images per training forward on each process
    accumulation: int  # training micro-batches per optimizer step on each process (per trained noise step)
    notes: tuple[str, ...] = ()  # where the plan departs from the options, for the log


def make_plan(options: RunOptions, num_processes: int, gradient_steps: int, batch_size: int | None = None) -> Plan:
    """Derive the plan. m is raised until m·k divides evenly over processes and batches (docs/method.md §4).

    A batch larger than a process's share of the epoch is first reduced to that share, so that adding processes does
    not change how many prompts an epoch has where it need not.

    Args:
        options: The run's.
        num_processes: From the launcher.
        gradient_steps: The objective's default for ``train.gradient_step_per_epoch``.
        batch_size: Images per sampling forward; None = ``config.sample.batch_size``.
    """
    asked = options.sample.batch_size if batch_size is None else batch_size
    wanted, k = options.sample.unique_sample_num_per_epoch, options.sample.num_images_per_prompt
    batch = min(asked, max(1, wanted * k // num_processes))
    unit = num_processes * batch
    step = unit // math.gcd(unit, k)
    prompts = math.ceil(wanted / step) * step
    share = prompts * k // num_processes
    steps = options.train.gradient_step_per_epoch or gradient_steps
    per_step = math.ceil(prompts * k / steps)
    notes = []
    if batch != asked:
        notes.append(f"sample.batch_size {asked} exceeds a process's share; {batch} is used")
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
        gradient_steps=steps,
        samples_per_step=per_step,
        train_batch_size=options.train.batch_size,
        accumulation=math.ceil(per_step / num_processes / options.train.batch_size),
        notes=tuple(notes),
    )


def choose_batch_size(
    options: RunOptions,
    policy: Policy,
    items: Sequence[Item],
    accelerator: Accelerator,
    folder: Path,
    parameters: Sequence[torch.Tensor],
) -> int:
    """Images per sampling forward: ``config.sample.batch_size``, or, for 0, what fits; equal on all processes.

    A resumed run takes its earlier value (plan.json), so that it computes the same bits. The numbers of an epoch do not
    depend on the batch except by rounding.

    Args:
        options: The run's.
        policy: In place, with its adapters; the local rewards are loaded.
        items: The training items.
        accelerator: The processes.
        folder: Of the run.
        parameters: The trained ones; their optimizer state and average are not there yet.
    """
    asked = options.sample.batch_size
    if asked:
        return asked
    plan = folder / "plan.json"
    if options.resume_from and (earlier := main_decides(accelerator, lambda: _earlier_batch_size(plan))):
        return earlier
    samples = options.sample.unique_sample_num_per_epoch * options.sample.num_images_per_prompt
    share = max(1, samples // accelerator.num_processes)
    on_cpu = policy.device.type == "cpu"
    fits = _IMAGES_ON_CPU if on_cpu else _fitting_on_gpu(options, policy, items, parameters, share)
    fits = int(accelerator.gather(torch.tensor([fits], device=accelerator.device)).min())
    chosen = largest_divisor(share, min(fits, _MOST_IMAGES))
    logger.info("sample.batch_size: %d images (%d would fit; %d an epoch on each process)", chosen, fits, share)
    return chosen


def _earlier_batch_size(plan: Path) -> int | None:
    """Of the run's plan.json, None if there is none yet."""
    if not plan.is_file():
        return None
    try:
        size = json.loads(plan.read_text(encoding="utf-8"))["sample_batch_size"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{plan} cannot be read ({error}); set config.sample.batch_size") from error
    if type(size) is not int or size < 1:
        raise ConfigError(f"{plan}: sample_batch_size is {size!r}; set config.sample.batch_size")
    return size


def largest_divisor(number: int, most: int) -> int:
    """Largest divisor of ``number`` ≥ 1 that is at most ``most`` ≥ 1."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def fitting(peak: Callable[[int], int], limit: int) -> int:
    """Images whose peak memory stays below ``limit`` bytes, at least 1: extrapolated from ``peak(1)`` and ``peak(2)``."""
    one, two = peak(1), peak(2)
    return max(1, 1 + (limit - one) // max(1, two - one))


def merges_lora(options: RunOptions, device: torch.device) -> bool:
    """Whether steps without noise run with the LoRA merged into the base weights (``sample.merge_lora``)."""
    chosen = options.sample.merge_lora
    if chosen is None:  # equal to float32 rounding; on a GPU, TF32 rounds more and the copy of the weights takes memory
        chosen = options.mixed_precision == "no" and device.type == "cpu" and options.pretrained.quantize is None
    return chosen and options.use_lora


def on_cuda(chosen: bool | None, device: torch.device) -> bool:
    """An option for which None means: where the device is CUDA."""
    return device.type == "cuda" if chosen is None else chosen


def largest_item(options: RunOptions, policy: Policy, items: Sequence[Item]) -> Item:
    """The item with the most pixels, at its size. One reference image is in memory at a time."""

    def area(item: Item) -> int:
        sized = at_size(item, options.train.resolution, options.item_size, policy)
        return sized.height * sized.width

    return at_size(max(items, key=area), options.train.resolution, options.item_size, policy)


def _fitting_on_gpu(
    options: RunOptions, policy: Policy, items: Sequence[Item], parameters: Sequence[torch.Tensor], share: int
) -> int:
    """Measured: one short rollout and its decoding, which overlap. Added: what an epoch holds meanwhile."""
    device, sample, train = policy.device, options.sample, options.train
    item = largest_item(options, policy, items)
    conditioning = policy.encode([item])
    noisy = sample_noise_steps(sample.noise_steps, sample.num_noise_steps, options.seed, 0) if sample.noise_level else ()
    weights = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    latents = policy.initial_latents([0], item.height, item.width)
    texts = sum(t.nbytes for t in vars(conditioning).values() if isinstance(t, torch.Tensor) and t.device == device)
    later = (
        weights * ((2 if train.use_8bit_adam else 8) + (4 if train.ema else 0))
        + share * latents.nbytes * (1 + 3 * len(noisy))  # clean latents; x, x' and the mean of each noise step
        + min(share, sample.unique_sample_num_per_epoch) * texts
    )
    free, _ = torch.cuda.mem_get_info(device)
    limit = int(_MEMORY_SHARE * (free + torch.cuda.memory_reserved(device))) - later

    def added(work: Callable[[], None]) -> int:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before

    @torch.no_grad()
    def peak(images: int) -> int:
        rows = conditioning.select(torch.zeros(images, dtype=torch.int64))
        latents = policy.initial_latents(list(range(images)), item.height, item.width)
        held = torch.cuda.memory_allocated(device)
        denoising = added(
            lambda: rollout(
                policy,
                rows,
                [item.item_id] * images,
                range(images),
                item.height,
                item.width,
                num_steps=2,
                noise_steps=(0,),
                noise_level=sample.noise_level,
                cps=sample.cps,
                merge_lora=merges_lora(options, device),
                tail=Tail(weights=sample.tail_weights),
            )
        )
        decoding = added(lambda: policy.decode(latents, item.height, item.width))
        overlap = on_cuda(options.speed.overlap_decode, device)
        return held + (denoising + decoding if overlap else max(denoising, decoding))

    peak(1)  # permanent allocations of the first forward
    return fitting(peak, limit)
