"""From counts to seconds, from bytes to a verdict, and how many GPUs should serve the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paco_grpo.rehearsal.fake_gpu import Counts

GIB = 2**30
# Not held by any tensor: CUDA context and libraries, cuBLAS and cuDNN workspaces, fragmentation of the allocator.
RESERVE = 1.5 * GIB
# Assumed shares of the stated peaks; no GPU run has confirmed them.
MATRIX_SHARE = 0.62
BANDWIDTH_SHARE = 1.0
LAUNCH = 9.5e-6  # seconds of the host for a kernel, with Python around it
PCIE = 5e9  # bytes a second from pageable main memory, where performance/offload.py keeps weights


@dataclass(frozen=True)
class GPU:
    """What its data sheet states.

    Attributes:
        memory: Bytes that a process can use.
        flops: Dense bfloat16 a second.
        bandwidth: Bytes a second.
    """

    memory: int
    flops: float
    bandwidth: float


def _gpu(gib: float, teraflops: float, terabytes: float) -> GPU:
    return GPU(int(gib * GIB), teraflops * 1e12, terabytes * 1e12)


# The usable memory is that of the smallest card sold as such, ECC on.
GPUS = {
    "B200 180GB": _gpu(178.0, 2250, 7.7),
    "H200 141GB": _gpu(139.8, 989, 4.8),
    "H100 80GB": _gpu(79.2, 989, 3.35),
    "H800 80GB": _gpu(79.2, 989, 3.35),
    "A100 80GB": _gpu(79.2, 312, 2.04),
    "L40S 48GB": _gpu(44.4, 362, 0.864),
    "A6000 48GB": _gpu(47.4, 155, 0.768),
    "A100 40GB": _gpu(39.4, 312, 1.55),
    "RTX 5090 32GB": _gpu(31.3, 210, 1.79),
    "RTX 4090 24GB": _gpu(23.5, 165, 1.01),
    "RTX 3090 24GB": _gpu(23.5, 71, 0.94),
}


def gpu_with(gigabytes: float) -> GPU:
    """A card of ``gigabytes`` as sold: the known one with the nearest memory."""
    name = min(GPUS, key=lambda name: abs(int(name.split()[-1].removesuffix("GB")) - gigabytes))
    known = GPUS[name]
    sold = int(name.split()[-1].removesuffix("GB"))
    return GPU(int(known.memory * gigabytes / sold), known.flops, known.bandwidth)


def seconds(counts: Counts, gpu: GPU) -> float:
    """The longer of the GPU's time (matrix products, then memory traffic) and the host's to launch it; plus transfers."""
    device = counts.flops / (MATRIX_SHARE * gpu.flops) + counts.bytes / (BANDWIDTH_SHARE * gpu.bandwidth)
    return max(device, counts.kernels * LAUNCH) + counts.to_device / PCIE


# --- the judge's share ------------------------------------------------------------------------------------------------


class PlanError(ValueError):
    """Invalid or missing numbers; the message names the argument."""


@dataclass(frozen=True)
class Workload:
    """One epoch, and how fast one GPU works.

    Attributes:
        images: m·k, over all GPUs.
        batch_size: Images per GPU and sampling batch.
        pairs: Judge questions per image; 0 = no judge.
        sample_seconds: Per image on one GPU, with decoding.
        train_seconds: Per image on one GPU, all trained steps.
        other_seconds: Per epoch, independent of the split.
        pairs_per_second: Rate of a judge on one GPU with enough questions in flight.
    """

    images: int
    batch_size: int
    pairs: int
    sample_seconds: float
    train_seconds: float
    other_seconds: float
    pairs_per_second: float


@dataclass(frozen=True)
class Split:
    """Expected seconds of an epoch for one division of the GPUs.

    Attributes:
        generating: GPUs that sample and train.
        serving: GPUs of the judge.
        sample: Until the last image is sampled.
        reward: Total work of the judge.
        wait: From the last image until all scores have arrived.
        train: The update.
        epoch: Total.
        bottleneck: sampling | rewards | training, whichever takes longest.
    """

    generating: int
    serving: int
    sample: float
    reward: float
    wait: float
    train: float
    epoch: float
    bottleneck: str


def predict(work: Workload, generating: int, serving: int) -> Split:
    """Expected times of one split.

    For G generating and J serving GPUs, S images in batches of B, P pairs an image, R pairs a second and GPU, s and t
    seconds an image: sampling takes ceil(S / (G·B))·B·s. The judge starts when the first batch is sampled and cannot finish
    before the last one is; all its pairs take S·P / (J·R). Training takes ceil(S / G)·t.

    Raises:
        PlanError: No GPU generates, or none serves although there are pairs to judge.
    """
    if generating < 1:
        raise PlanError("at least one GPU has to generate")
    if work.pairs and serving < 1:
        raise PlanError("at least one GPU has to serve the judge: there are pairs to score")
    batches = math.ceil(work.images / (generating * work.batch_size))
    first = min(work.batch_size, math.ceil(work.images / generating)) * work.sample_seconds
    sample = batches * first
    reward = work.images * work.pairs / (serving * work.pairs_per_second) if work.pairs else 0.0
    wait = max(reward / batches, first + reward - sample) if work.pairs else 0.0
    train = math.ceil(work.images / generating) * work.train_seconds
    longest = {"sampling": sample, "rewards": reward, "training": train}
    return Split(
        generating, serving, sample, reward, wait, train, sample + wait + train + work.other_seconds,
        max(longest, key=longest.__getitem__),
    )  # fmt: skip


def splits(work: Workload, gpus: int, gpus_per_judge: int = 1) -> list[Split]:
    """Every split of ``gpus``, in order of serving GPUs, which come in multiples of ``gpus_per_judge``.

    Raises:
        PlanError: There are too few GPUs for a judge and a generator, or a number makes no sense.
    """
    for name in ("images", "batch_size"):
        if getattr(work, name) < 1:
            raise PlanError(f"{name} = {getattr(work, name)} must be at least 1")
    for name in ("pairs", "sample_seconds", "train_seconds", "other_seconds"):
        if not 0 <= getattr(work, name) < math.inf:
            raise PlanError(f"{name} = {getattr(work, name)} must be 0 or more")
    if work.pairs and not 0 < work.pairs_per_second < math.inf:
        raise PlanError(f"pairs_per_second = {work.pairs_per_second} must be greater than 0")
    if gpus_per_judge < 1:
        raise PlanError(f"gpus_per_judge = {gpus_per_judge} must be at least 1")
    counts = range(gpus_per_judge, gpus, gpus_per_judge) if work.pairs else range(1)
    if not counts or gpus < 1:
        raise PlanError(f"{gpus} GPU(s) are too few for a judge on {gpus_per_judge} and one generating GPU")
    return [predict(work, gpus - serving, serving) for serving in counts]


def best(found: Sequence[Split]) -> Split:
    """The shortest epoch; among equals, the one with the fewest serving GPUs."""
    return min(found, key=lambda split: (split.epoch, split.serving))
