"""The same epoch in launches with other environment variables: CPU threads, memory allocators.

What a process reads once, when it starts, cannot take turns within one process: each setting is a launch of epoch.py
here, and launches take turns within each round. Ratios are to the first setting. scripts/launch.sh sets what is best
where this was measured, and prints it.

    python benchmarks/environment.py --setting OMP_NUM_THREADS=1 --setting OMP_NUM_THREADS=2 -- --preset toy --k 4
    python benchmarks/environment.py --setting PYTORCH_CUDA_ALLOC_CONF= \\
        --setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True -- --preset flux-dev --batch 8 --train-batch 4

A setting is NAME=VALUE, several joined by spaces; NAME= takes a variable away. What no setting names is as it is here.
What follows ``--`` goes to epoch.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from measuring import machine
from measuring.launches import LaunchFailed, split_at_dashes, take_turns
from measuring.repeats import ratios, summary

REFUSED = 2


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; returns 0, 2 for a setting that cannot be read, or the exit status of a launch that failed."""
    own, rest = split_at_dashes(given)
    arguments = parser().parse_args(own)
    options = [*rest, "--repeats", str(arguments.repeats)]
    try:
        settings = {text: environment(os.environ, variables(text)) for text in arguments.setting}
        launches = take_turns(
            list(settings), arguments.rounds, options, lambda text: ([sys.executable], settings[text])
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except LaunchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    base = launches[arguments.setting[0]]
    rows = [row_of(text, made, base) for text, made in launches.items()]
    said = {"rounds": arguments.rounds, "repeats": arguments.repeats, "epoch": rest}
    made = machine.report("environment", said, rows=rows, device=base[0]["device"], epoch_settings=base[0]["settings"])
    machine.write(arguments.output, made)
    print(arguments.output)
    return 0


def variables(text: str) -> dict[str, str]:
    """Names and values of a setting.

    Raises:
        ValueError: A part of it is not NAME=VALUE.
    """
    found = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ValueError(f"--setting {text!r}: {part!r} is not NAME=VALUE")
        found[name] = value
    return found


def environment(present: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """``present`` with what ``given`` sets, and without what it empties."""
    return {name: value for name, value in {**present, **given}.items() if given.get(name) != ""}


def row_of(text: str, made: Sequence[dict], base: Sequence[dict]) -> dict:
    """Medians over all launches of a setting, and ratios to the first one's within each round."""

    def seconds(reports: Sequence[dict], name: str) -> list[float]:
        return [each[0]["seconds"][name] for report in reports for each in report["results"][0]["epochs"]]

    names = ("epoch", "cpu", "sampling", "training")
    return {
        "setting": text,
        "seconds": {name: summary(seconds(made, name)) for name in names},
        "ratio": {name: ratios(seconds(made, name), seconds(base, name)) for name in names},
        "memory": {
            name: max(report["results"][0]["memory"][name] for report in made)
            for name in made[0]["results"][0]["memory"]
        },
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--setting", action="append", required=True, metavar="NAME=VALUE", help="the first is the base; may be repeated"
    )
    made.add_argument("--rounds", type=int, default=3, help="launches of each")
    made.add_argument("--repeats", type=int, default=2, help="counted epochs of a launch")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/environment.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
