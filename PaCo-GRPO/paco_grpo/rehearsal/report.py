"""A rehearsal as text: one table of an epoch's work, one of its memory, and the verdict."""

from __future__ import annotations

from paco_grpo.rehearsal.epoch import Rehearsal, Work
from paco_grpo.rehearsal.fake_gpu import Counts
from paco_grpo.rehearsal.plan import GIB, GPU, RESERVE, Split, Workload, best, seconds


def epoch_seconds(found: Rehearsal, gpu: GPU) -> dict[str, float]:
    """Predicted seconds an epoch by kind of work, on each of the generating GPUs."""
    return {work.name: work.epoch * seconds(work.each, gpu) for work in found.work}


def workload(found: Rehearsal, gpu: GPU, pairs: float, pairs_per_second: float) -> Workload:
    """What dividing GPUs between generator and judge needs."""
    took, share = epoch_seconds(found, gpu), found.plan.samples_per_process
    sampling = took["texts to GPU"] + took["encode"] + took["denoise"] + took["decode"]
    return Workload(
        images=found.plan.samples,
        batch_size=found.plan.sample_batch_size,
        pairs=pairs,
        sample_seconds=sampling / share,
        train_seconds=took["train"] / share,
        other_seconds=sum(took.values()) - sampling - took["train"],
        pairs_per_second=pairs_per_second,
    )


def left(found: Rehearsal, gpu: GPU) -> float:
    """Bytes left on the card at the highest peak; negative: it does not fit."""
    return gpu.memory - RESERVE - found.peak


def text(found: Rehearsal, gpu: GPU, gpu_name: str) -> str:
    """Work, memory and verdict."""
    plan = found.plan
    lines = [
        (
            f"{found.name} on {plan.num_processes} x {gpu_name}: {plan.samples} images an epoch ({plan.prompts} prompts x "
            f"{plan.images_per_prompt}), sampled {plan.sample_batch_size} and trained {plan.train_batch_size} at a time"
        ),
        "",
        f"{'on each GPU':<12} {'pieces':>7} {'TFLOP':>8} {'GB moved':>9} {'kernels':>8} {'casts':>6} {'s each':>8} {'s':>9}",
    ]
    lines += [_row(work, gpu) for work in found.work]
    total = sum(epoch_seconds(found, gpu).values())
    lines += [f"{'an epoch':<12} {'':>7} {_sum(found):>8.0f} {'':>9} {'':>8} {'':>6} {'':>8} {total:>9.1f}", ""]
    lines += [_row(work, gpu) for work in found.sometimes]
    lines += [f"a checkpoint writes {found.checkpoint_bytes / 1e9:.1f} GB", "", "GiB on a GPU"]
    lines.append("resident: " + _parts(found.resident))
    for phase, parts in found.adds.items():
        lines.append(f"{phase:<11} {found.totals[phase] / GIB:6.1f}  + " + _parts(parts))
    lines += ["", *(f"note: {note}" for note in found.notes), verdict(found, gpu, gpu_name)]
    return "\n".join(lines)


def verdict(found: Rehearsal, gpu: GPU, gpu_name: str) -> str:
    """Whether it fits."""
    worst = max(found.totals, key=found.totals.__getitem__)
    spare = left(found, gpu) / GIB
    peak = f"peak {found.peak / GIB:.1f} GiB ({worst}) + {RESERVE / GIB:.1f} for CUDA itself"
    if spare >= 0:
        return f"fits: {peak}; {spare:.1f} GiB of {gpu_name} are left"
    return f"does not fit: {peak}; {-spare:.1f} GiB too much for {gpu_name}"


def split_table(found: list[Split]) -> str:
    """One line a split, the best marked."""
    chosen = best(found)
    lines = [f"{'generate':>8} {'serve':>5} {'sample s':>9} {'judge s':>8} {'wait s':>7} {'train s':>8} {'epoch s':>8}"]
    for split in found:
        mark = f"  <- best; most time: {split.bottleneck}" if split is chosen else ""
        lines.append(
            f"{split.generating:>8} {split.serving:>5} {split.sample:>9.1f} {split.reward:>8.1f} {split.wait:>7.1f} "
            f"{split.train:>8.1f} {split.epoch:>8.1f}{mark}"
        )
    return "\n".join(lines)


SUMMARY = """| configuration | GPU | images at once: sampled, trained, tested | resident, GiB | peak, GiB | left, GiB | \
PFLOP | s an epoch | s an evaluation |
|---|---|--:|--:|--:|--:|--:|--:|--:|"""


def summary_row(found: Rehearsal, gpu: GPU, gpu_name: str) -> str:
    """One line of the table that ``SUMMARY`` heads; PFLOP and seconds are those of an epoch on each GPU."""
    worst = max(found.totals, key=found.totals.__getitem__)
    flops = sum(work.each.flops * work.epoch for work in found.work) / 1e15
    took, tested = sum(epoch_seconds(found, gpu).values()), found.sometimes[0]
    cells = (
        f"`{found.name}`", gpu_name, f"{found.plan.sample_batch_size}, {found.plan.train_batch_size}, {found.tested_at_once}",
        f"{sum(found.resident.values()) / GIB:.1f}", f"{found.peak / GIB:.1f} ({worst})", f"{left(found, gpu) / GIB:.1f}",
        f"{flops:.0f}", f"{took:.0f}", f"{tested.epoch * seconds(tested.each, gpu):.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _row(work: Work, gpu: GPU) -> str:
    each, took = work.each, seconds(work.each, gpu)
    return (
        f"{work.name:<12} {work.epoch:>7.0f} {each.flops / 1e12:>8.2f} {each.bytes / 1e9:>9.1f} {each.kernels:>8} "
        f"{each.casts:>6} {took:>8.3f} {work.epoch * took:>9.1f}"
    )


def _sum(found: Rehearsal) -> float:
    total = sum((work.each.times(work.epoch) for work in found.work), Counts())
    return total.flops / 1e12


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
