"""From measured pieces to seconds, a verdict on memory, and GPUs for generator and judge."""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paco_grpo.data.prompts import load_prompts
from paco_grpo.estimate.fake_device import Measured
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.training.plan import Plan
from paco_judge.grid import split_prompt

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA context and libraries, workspaces of cuBLAS and cuDNN, fragmentation
EFFICIENCY = 0.35  # assumed share of a GPU's stated bfloat16 peak
# Usable GiB of the smallest card sold as such (ECC on), and stated dense bfloat16 TFLOP a second.
GPUS = {
    "B200 180GB": (178.0, 2250),
    "H200 141GB": (139.8, 989),
    "H100 80GB": (79.2, 989),
    "H800 80GB": (79.2, 989),
    "A100 80GB": (79.2, 312),
    "L40S 48GB": (44.4, 362),
    "A6000 48GB": (47.4, 155),
    "A100 40GB": (39.4, 312),
    "RTX 5090 32GB": (31.3, 210),
    "RTX 4090 24GB": (23.5, 165),
    "RTX 3090 24GB": (23.5, 71),
}
# Tokens of a pair's prompt; parameters of Qwen2.5-VL-7B.
JUDGE_TOKENS = 300
JUDGE_PARAMETERS = 8.3e9
T2IS = Path(__file__).resolve().parents[2] / "dataset" / "T2IS"


@dataclass(frozen=True)
class Card:
    """A GPU, and how fast it is assumed to be."""

    label: str
    memory: float  # bytes
    flops: float  # a second, that it is assumed to reach
    # Seconds of the host for an operator, which is the limit of small batches.
    operator_s: float = 0.0

    def seconds(self, work: "Work", compiled: bool = False) -> float:
        """Seconds for all pieces, by the GPU or the host, whichever is slower.

        Compiled blocks start few kernels, so the host does not count.
        """
        host = 0.0 if compiled else work.operators * self.operator_s
        return work.pieces * max(work.flops / self.flops, host)


def card_of(name: str, memory_gb: float | None, operator_s: float) -> Card:
    """The card called ``name``; with ``memory_gb``, a card that is sold with that much memory.

    It is as fast as the known card with the nearest memory.
    """
    label = name
    share = 1.0
    if memory_gb:
        sold = {name: int(name.split()[-1].removesuffix("GB")) for name in GPUS}
        name = min(sold, key=lambda name: abs(sold[name] - memory_gb))
        label = f"a card of {memory_gb:g} GB"
        share = memory_gb / sold[name]
    gib, teraflops = GPUS[name]
    return Card(label, gib * GIB * share, EFFICIENCY * teraflops * 1e12, operator_s)


@dataclass(frozen=True)
class Work:
    """One kind of work of a GPU."""

    name: str
    pieces: float  # per epoch, evaluation or 10,000 pairs
    flops: float  # of a piece
    operators: float = 0.0  # of a piece

    @classmethod
    def of(cls, name: str, pieces: float, measured: Measured, share: float = 1.0) -> Self:
        """``pieces``, each of which is ``share`` of what was measured."""
        return cls(name, pieces, share * measured.flops, share * measured.operators)

    def __add__(self, measured: Measured) -> Self:
        """Each piece with what else was measured."""
        return dataclasses.replace(
            self,
            flops=self.flops + measured.flops,
            operators=self.operators + measured.operators,
        )


@dataclass
class Estimate:
    """What one GPU does and holds."""

    title: str
    work: dict[str, list[Work]]  # by what it is for: "an epoch"
    resident: dict[str, int]  # bytes that stay on the device, by part
    adds: dict[str, dict[str, int]]  # bytes that a phase adds at its peak, by part
    plan: Plan | None = None  # of an epoch
    compiled: bool = False

    def seconds(self, purpose: str, card: Card) -> float:
        """Seconds of all work for ``purpose``."""
        return sum(card.seconds(work, self.compiled) for work in self.work[purpose])


# --- judge and generator --------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """The judge of a run."""

    pairs_per_image: float  # questions about an image
    gpus: int  # that hold one copy
    pairs_per_second: float  # of one GPU
    most_pairs_per_second: float  # of the API servers, however many GPUs there are

    def seconds(self, images: int, gpus: int) -> float:
        """Seconds for the questions about ``images`` with ``gpus`` GPUs."""
        rate = min(gpus * self.pairs_per_second, self.most_pairs_per_second)
        return images * self.pairs_per_image / rate


def judge_pairs_per_image(options: RunOptions) -> float:
    """Judge questions about an image: pairs of sub-figures, two for an edit, 0 without a judge."""
    if "consistency_score" in options.train.reward_fn:
        items = load_prompts(str(T2IS), "train", "geneval")
        grids = [split_prompt(item.prompt) for item in items]
        return statistics.mean(math.comb(grid.rows * grid.cols, 2) for grid in grids)
    return 2 if "consistency_for_editing" in options.train.reward_fn else 0


def judge_of_run(
    options: RunOptions, card: Card, measured_rate: float | None, most_requests: float
) -> Judge | None:
    """The judge that ``options`` ask, if any.

    Args:
        measured_rate: Pairs a second of one GPU, if known; otherwise from its FLOPs.
        most_requests: A second, of all API servers.
    """
    pairs = judge_pairs_per_image(options)
    if not pairs:
        return None
    gpus = math.ceil(2 * JUDGE_PARAMETERS / (0.8 * card.memory))
    rate = measured_rate or card.flops / (2 * JUDGE_PARAMETERS * JUDGE_TOKENS)
    return Judge(pairs, gpus, rate, max(most_requests, measured_rate or 0))


def split(
    estimate: Estimate, card: Card, judge: Judge, generating: int, serving: int
) -> dict[str, float]:
    """Seconds of an epoch and its parts.

    The judge starts after the first batch is sampled and cannot finish before the last one is.
    """
    plan = estimate.plan
    of_image = {
        work.name: card.seconds(work, estimate.compiled) / plan.samples_per_process
        for work in estimate.work["an epoch"]
    }
    share = math.ceil(plan.samples / generating)
    train = share * of_image.pop("train")
    first_batch = min(plan.sample_batch_size, share) * sum(of_image.values())
    batches = math.ceil(plan.samples / (generating * plan.sample_batch_size))
    sample = batches * first_batch
    judging = judge.seconds(plan.samples, serving)
    wait = max(judging / batches, first_batch + judging - sample)
    return {
        "sample": sample,
        "judge": judging,
        "wait": wait,
        "train": train,
        "epoch": sample + wait + train,
    }


def best_split(
    estimate: Estimate, card: Card, judge: Judge, gpus: int
) -> tuple[int, dict[int, dict[str, float]]]:
    """The number of serving GPUs with the shortest epoch, and ``split`` for every number."""
    splits = {}
    for serving in range(judge.gpus, gpus, judge.gpus):
        splits[serving] = split(estimate, card, judge, gpus - serving, serving)
    best = min(splits, key=lambda serving: splits[serving]["epoch"])
    return best, splits


def gpus_of_generator(judge: Judge | None, gpus: int) -> int:
    """Processes that are left beside one judge."""
    if judge is None:
        return gpus
    if gpus <= judge.gpus:
        raise ConfigError(f"--gpus {gpus} is too few for a judge on {judge.gpus} and a generator")
    return gpus - judge.gpus


# --- what is printed ------------------------------------------------------------------------------


def report(estimate: Estimate, card: Card) -> bool:
    """Print work, memory and verdict; returns whether it fits."""
    print(estimate.title)
    print(
        f"\n{'on each GPU':<13} {'pieces':>7} {'TFLOP each':>13} {'operators':>10} {'seconds':>9}"
    )
    for purpose, works in estimate.work.items():
        for work in works:
            _print_work(work, card.seconds(work, estimate.compiled))
        total = Work(
            purpose,
            1,
            sum(work.pieces * work.flops for work in works),
            sum(work.pieces * work.operators for work in works),
        )
        _print_work(total, estimate.seconds(purpose, card))
        print()
    peak = card.flops / EFFICIENCY / 1e12
    print(f"seconds: assumed {EFFICIENCY:.0%} of the stated {peak:.0f} TFLOPS; not measured")
    if card.operator_s and not estimate.compiled:
        print(f"and at least {card.operator_s * 1e6:g} µs of the host for an operator")
    return report_memory(estimate, card)


def _print_work(work: Work, seconds: float) -> None:
    print(
        f"{work.name:<13} {work.pieces:>7.0f} {work.flops / 1e12:>13.2f} "
        f"{work.operators:>10.0f} {seconds:>9.1f}"
    )


def report_memory(estimate: Estimate, card: Card) -> bool:
    """Print what each phase holds; returns whether the largest fits."""
    print("\nGiB on a GPU\nresident: " + _parts(estimate.resident))
    resident = sum(estimate.resident.values())
    totals = {}
    for phase, parts in estimate.adds.items():
        totals[phase] = resident + sum(parts.values())
        print(f"{phase:<12} {totals[phase] / GIB:6.1f}  + {_parts(parts)}")
    worst = max(totals, key=totals.__getitem__)
    spare = (card.memory - RESERVE - totals[worst]) / GIB
    verdict = "fits" if spare >= 0 else "does not fit"
    print(
        f"\n{verdict}: peak {totals[worst] / GIB:.1f} GiB ({worst}) + {RESERVE / GIB:.1f} "
        f"for CUDA itself leave {spare:.1f} GiB of {card.label}"
    )
    return spare >= 0


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def report_split(estimate: Estimate, card: Card, judge: Judge, gpus: int) -> float:
    """Print the seconds of an epoch for each division of ``gpus``; returns the best ones."""
    print(
        f"\njudge: {judge.pairs_per_image:.1f} pairs an image, "
        f"{judge.pairs_per_second:.0f} a second and GPU, "
        f"{judge.most_pairs_per_second:.0f} a second at most by its API servers; "
        f"{judge.gpus} GPU(s) hold one"
    )
    best, splits = best_split(estimate, card, judge, gpus)
    print("generate serve" + "".join(f"{name + ' s':>9}" for name in splits[best]))
    for serving, seconds in splits.items():
        values = "".join(f"{value:>9.1f}" for value in seconds.values())
        mark = "  <- best" if serving == best else ""
        print(f"{gpus - serving:>8} {serving:>5}{values}{mark}")
    return splits[best]["epoch"]


def report_run(options: RunOptions, epoch_s: float, evaluation_s: float) -> None:
    """Print the hours of a whole run."""
    epochs = options.num_epochs
    evaluations = 1
    if options.eval_freq:
        evaluations += math.ceil(epochs / options.eval_freq)
    hours = epochs * epoch_s / 3600
    hours_of_evaluation = evaluations * evaluation_s / 3600
    print(
        f"\na run: {epochs} epochs (config.num_epochs) of {epoch_s:.0f} s "
        f"and {evaluations} evaluations of {evaluation_s:.0f} s, "
        f"{hours:.1f} + {hours_of_evaluation:.1f} hours; an estimate"
    )
