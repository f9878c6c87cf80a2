"""The same epoch (same global batch) on one, two, four … processes: seconds, efficiency, share of waiting.

Each number of processes is a launch of epoch.py by torchrun; launches take turns within each round. Efficiency is
t(1) / (N · t(N)); waiting is the time in messages between processes (the slowest is waited for there), as a share of
the epoch.

    python benchmarks/scaling.py --processes 1 2 -- --preset toy                  # CPU: one thread for each process
    python benchmarks/scaling.py --processes 1 2 4 8 -- --preset flux-dev --m 42 --k 16 --batch 4 --train-batch 1

What follows ``--`` goes to epoch.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import machine
from measuring.launches import LaunchFailed, split_at_dashes, take_turns
from measuring.repeats import ratios, summary


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; returns 0, or the exit status of a launch that failed."""
    own, rest = split_at_dashes(given)
    arguments = parser().parse_args(own)

    def launcher(count: int) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        # without the dashes torchrun takes --m for one of its own
        return [*command, "--"], os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}

    try:
        launches = take_turns(
            arguments.processes, arguments.rounds, [*rest, "--repeats", str(arguments.repeats)], launcher
        )
    except LaunchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    base = launches[arguments.processes[0]]
    rows = [row_of(count, made, base) for count, made in launches.items()]
    settings = {"processes": arguments.processes, "rounds": arguments.rounds, "repeats": arguments.repeats,
                "threads": arguments.threads, "epoch": rest}  # fmt: skip
    first = base[0]
    made = machine.report("scaling", settings, rows=rows, device=first["device"], epoch_settings=first["settings"])
    machine.write(arguments.output, made)
    print(arguments.output)
    return 0


def row_of(count: int, made: Sequence[dict], base: Sequence[dict]) -> dict:
    """Medians over all rounds of ``count`` processes, and ratios to those of the first number within each round."""

    def epochs(reports: Sequence[dict]) -> list[float]:
        return [each[0]["seconds"]["epoch"] for report in reports for each in report["results"][0]["epochs"]]

    first = base[0]["processes"]
    waiting = [
        sum(process["seconds"]["collectives"] / process["seconds"]["epoch"] for process in each) / len(each)
        for report in made
        for each in report["results"][0]["epochs"]
    ]
    speedup = ratios(epochs(base), epochs(made))
    return {
        "processes": count,
        "images": made[0]["results"][0]["plan"]["samples"],
        "seconds": summary(epochs(made)),
        "speedup": speedup,
        "efficiency": speedup["median"] * first / count,
        "waiting_share": summary(waiting),
        "phases": {
            name: summary([report["results"][0]["seconds"][name]["median"] for report in made])
            for name in ("sampling", "training", "reward_wait")
        },
        "calls": made[0]["results"][0]["calls"],
        "raw": [[[p["seconds"] for p in each] for each in report["results"][0]["epochs"]] for report in made],
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes; the first is the base"
    )
    made.add_argument("--rounds", type=int, default=3, help="launches of each")
    made.add_argument("--repeats", type=int, default=2, help="counted epochs of a launch")
    made.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
