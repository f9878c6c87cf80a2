"""Does a configuration fit on a GPU, what fills the memory, and roughly how long is an epoch?

Needs no weights, no GPU, and a minute.

    python scripts/estimate.py --config config/grpo.py:t2is --gpu "H100 80GB" --processes 8
    python scripts/estimate.py --config config/grpo.py:t2is_24gb --memory_gb 24
    python scripts/estimate.py --config config/grpo.py:t2is --gpus 8  # how many for the judge?
    python scripts/estimate.py --judge --processes 2     # judge training (another: --judge YAML)

The policy encodes, samples, decodes and computes its loss at the model's real shapes on a fake CUDA
device. Tensors on two devices, wrong shapes and data types are errors here as on a GPU. The backward
pass runs on a fake CPU. The seconds assume that every GPU reaches 35 % of its stated peak, and that
the host needs 9 µs to start an operator. Not estimated: the time to compile, DeepSpeed, and training
of a judge's vision tower.

Exit status: 0 = fits; 1 = does not fit, or the code failed; 2 = a wrong option.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it


def positive(text: str) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def parser() -> argparse.ArgumentParser:
    """The options that are not the run's own."""
    options = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    add("--gpu", default="H100 80GB", help='card, such as "A100 80GB" or "RTX 4090 24GB"')
    add("--memory_gb", type=positive, help="or the card's memory alone, as sold")
    add("--processes", type=count, default=1, help="GPUs that share an epoch's images")
    add("--judge", action="store_true", help="judge training: [YAML] [key=value …]")
    add("--gpus", type=count, help="GPUs to divide between generator and judge")
    add(
        "--judge_pairs_per_second",
        type=positive,
        help="of a judge on one GPU (benchmarks/judge_load.py); otherwise from its FLOPs",
    )
    add(
        "--judge_requests_per_second",
        type=positive,
        default=80.0,
        help="that one API server of the judge reads, an assumption (80)",
    )
    add("--judge_api_servers", type=count, default=4, help="of the judge (VLLM_API_SERVERS; 4)")
    add(
        "--operator_us",
        type=positive,
        default=9.0,
        help="microseconds of the host for an operator, an assumption (9)",
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given, rest = parser().parse_known_args(arguments)

    # PyTorch and diffusers take seconds to import; --help and wrong arguments do not wait for them.
    from paco_grpo.estimate.planning import GPUS
    from paco_grpo.options import ConfigError
    from paco_grpo.policies import PolicyLoadError
    from paco_judge.errors import UserError

    try:
        if given.gpu not in GPUS:
            raise ConfigError(f"--gpu {given.gpu!r} is not known: {', '.join(GPUS)}")
        if not given.judge:
            return estimate_run(given, rest)
        return estimate_judge_training(given, rest)
    except (PolicyLoadError, UserError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def estimate_run(given: argparse.Namespace, rest: list[str]) -> int:
    """Print the estimate of a run; returns the exit status."""
    from paco_grpo.estimate import generator, planning
    from paco_grpo.options import read_options

    card = planning.card_of(given.gpu, given.memory_gb, given.operator_us / 1e6)
    options, name = read_options(rest)
    if given.gpus is None:
        fits = planning.report(generator.estimate(options, name, given.processes), card)
        return 0 if fits else 1
    requests = given.judge_requests_per_second * given.judge_api_servers
    judge = planning.judge_of_run(options, card, given.judge_pairs_per_second, requests)
    processes = planning.gpus_of_generator(judge, given.gpus)
    estimate = generator.estimate(options, name, processes)
    fits = planning.report(estimate, card)
    epoch_s = estimate.seconds("an epoch", card)
    if judge is not None:
        epoch_s = planning.report_split(estimate, card, judge, given.gpus)
    planning.report_run(options, epoch_s, estimate.seconds("an evaluation", card))
    return 0 if fits else 1


def estimate_judge_training(given: argparse.Namespace, rest: list[str]) -> int:
    """Print the estimate of a judge's training; returns the exit status."""
    from paco_grpo.estimate import judge_training, planning
    from paco_reward.config import load_config

    card = planning.card_of(given.gpu, given.memory_gb, given.operator_us / 1e6)
    has_file = bool(rest) and Path(rest[0]).is_file()
    file = Path(rest.pop(0)) if has_file else judge_training.PUBLISHED_JUDGE
    config = load_config(file, rest)
    estimate = judge_training.estimate_judge(config, file.stem, given.processes)
    return 0 if planning.report(estimate, card) else 1


if __name__ == "__main__":
    sys.exit(main())
