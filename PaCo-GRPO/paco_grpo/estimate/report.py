"""Does a configuration fit on a GPU, what fills the memory, and roughly how long is an epoch?

Needs no weights, no GPU, and a minute or two.

    python scripts/estimate.py --config config/grpo.py:t2is --gpu "H100 80GB" --processes 8
    python scripts/estimate.py --config config/grpo.py:t2is_24gb --gpu "RTX 4090 24GB"

The policy encodes, samples, decodes and trains at the model's real shapes on a device that computes
shapes alone. The seconds assume that a GPU reaches a share of its stated peak (--share), and
without compiled blocks no more than an H100 does. The parts of evaluations and of the judge need
the run's prompts. Not estimated: other rewards, reading and writing, the time to compile.

Exit status: 0 = it fits; 1 = an error; 2 = a wrong option; 3 = it does not fit.
"""

import argparse
import math
from collections.abc import Sequence

from paco_grpo.commands import parse_beside_options, start_logging
from paco_judge.arguments import Parser
from paco_judge.errors import UserError, run_command

GIB = 2**30
# Of the stated peak, with compiled blocks. An H100 reaches 27 % without them for an image of 1024 px
# (huggingface.co/blog/lora-fast), and compiling makes it 1.5 times as fast (PyTorch's report of 11
# May 2026, without a LoRA). A slower card should reach about as much without compiling, as the
# operations and bytes of a block suggest.
SHARE = 0.42
# The most TFLOP a second without compiled blocks, where the GPU waits for PyTorch to start kernels:
# what an H100 reached while it sampled for `t2is` (FLUX.1-dev, one image of 512 px at a time). It
# reached 133 while it trained (docs/evidence.md).
EAGER_LIMIT = 182
# Epochs of the toy's runs (quickstart/results.csv).
TOY_EPOCHS = 16
# The authors' training of FLUX.1-dev (2512.04784v2, table 5).
PUBLISHED_HOURS = 6
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


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=style)
    cards = ", ".join(GPUS)
    parser.add_argument("--gpu", default="H100 80GB", type=card, help=f"part of a name: {cards}")
    parser.add_argument("--processes", type=int, default=1, help="GPUs that share an epoch")
    share = f"of the stated peak that is reached (default {SHARE}; not compiled: see above)"
    parser.add_argument("--share", type=float, help=share)
    text = (
        "GPUs of the same kind that serve the judge of PaCo-Reward-7B's size (default 1); 0: it is "
        "in 4 bits on the training's one GPU, as in docs/one-gpu.md"
    )
    parser.add_argument("--judge_gpus", type=int, default=1, help=text)
    arguments, rest = parse_beside_options(parser, words)
    return run_command(lambda: report(arguments, rest), ImportError, OSError)


def card(text: str) -> str:
    """The name in ``GPUS`` of which ``text`` is a part; spaces and case do not count."""
    part = text.replace(" ", "").casefold()
    names = [name for name in GPUS if part in name.replace(" ", "").casefold()]
    if len(names) != 1:
        meant = " or ".join(names or GPUS)
        raise argparse.ArgumentTypeError(f"{text!r} is no single card; give {meant}")
    return names[0]


def report(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the estimate of a run; returns the exit status."""
    start_logging()
    # PyTorch and diffusers take seconds to import; --help does not wait for them.
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from paco_grpo.estimate.generator import RESERVE, estimate
    from paco_grpo.estimate.judge import judge_part
    from paco_grpo.estimate.table import advice
    from paco_grpo.options import read_options

    if arguments.judge_gpus == 0 and arguments.processes > 1:
        raise UserError("--judge_gpus 0 is for --processes 1: the judge shares the one GPU")
    # Of bars, and of texts that are too long, which an estimate may shorten.
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
    options, name = read_options(rest)
    gib, stated = GPUS[arguments.gpu]
    estimated = estimate(options, name, arguments.processes, gib * GIB)
    share = arguments.share or assumed_share(stated, options.speed.compile)
    print(f"{estimated.title}\n\n{'each GPU':<12}{'TFLOP':>9}{'seconds':>9}")
    epoch = estimated.epoch | {"an epoch": sum(estimated.epoch.values())}
    for phase, flops in epoch.items():
        teraflops = flops / 1e12
        print(f"{phase:<12}{teraflops:>9.0f}{teraflops / (share * stated):>9.1f}")
    speed = share * stated * 1e12
    evaluation = (estimated.evaluation or 0) / speed
    if evaluation:
        print(f"{'evaluation':<12}{estimated.evaluation / 1e12:>9.0f}{evaluation:>9.1f}")
    else:
        print("evaluations are left out: there are no test prompts")
    print(f"seconds: assumed {share:.0%} of the stated {stated} TFLOP a second")
    phases = {phase: flops / speed for phase, flops in estimated.epoch.items()}
    judge = judge_part(options, phases, arguments.processes, arguments.judge_gpus, stated)
    for line in judge.lines:
        print(line)
    hours = (sum(phases.values()) + judge.waiting) / 3600
    evaluations = num_evaluations(options.eval_freq)
    gpus = arguments.processes + judge.gpus
    print(lengths_of_runs(hours, evaluations, evaluations * evaluation / 3600, gpus))
    print("\nGiB on a GPU\nresident: " + _parts(estimated.resident))
    peaks = estimated.peaks
    for phase, peak in peaks.items():
        print(f"{phase:<12} {peak / GIB:6.1f}  + {_parts(estimated.adds[phase])}")
    worst = max(peaks, key=peaks.__getitem__)
    spare = gib - (RESERVE + peaks[worst] + sum(judge.beside.values())) / GIB
    verdict = "fits" if spare >= 0 else "does not fit"
    if judge.beside:
        print(f"beside it: {_parts(judge.beside)}")
    print(
        f"\n{verdict}: peak {peaks[worst] / GIB:.1f} GiB ({worst}) + {RESERVE / GIB:.1f} "
        f"for CUDA itself leave {spare:.1f} GiB of {arguments.gpu}"
    )
    if spare >= 0:
        return 0
    print(advice(options, gib, gib - spare))
    return 3


def assumed_share(stated: float, compiled: bool) -> float:
    """Share of its ``stated`` TFLOP a second that a GPU reaches."""
    return SHARE if compiled else min(SHARE, EAGER_LIMIT / stated)


def num_evaluations(frequency: int) -> int:
    """Of a run of ``TOY_EPOCHS``: the last is at its end."""
    return 1 + math.ceil(TOY_EPOCHS / frequency) if frequency else 1


def lengths_of_runs(hours: float, evaluations: int, of_evaluations: float, gpus: int) -> str:
    """Two lines about runs of known length.

    Args:
        hours: Of an epoch.
        evaluations: Of a run of ``TOY_EPOCHS``.
        of_evaluations: Hours of all of them.
        gpus: Those of the judge included.
    """
    toy = TOY_EPOCHS * hours + of_evaluations
    return (
        f"{TOY_EPOCHS} epochs, as in the quickstart, and {evaluations} evaluations: {toy:.1f} hours, "
        f"{toy * gpus:.1f} GPU-hours\n"
        f"{PUBLISHED_HOURS} hours, the authors' time for FLUX.1-dev: "
        f"{PUBLISHED_HOURS / hours:.0f} epochs, {PUBLISHED_HOURS * gpus} GPU-hours"
    )


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
