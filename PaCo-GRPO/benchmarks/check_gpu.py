"""Does this machine's GPU compute what the CPU computes, how fast, and in how much memory?

It takes ten minutes and downloads nothing.

    python benchmarks/check_gpu.py                                # run it first on a new machine
    python benchmarks/check_gpu.py --judge http://127.0.0.1:8000  # with a running judge

The most important comes first, until the minutes are over: an epoch of every family on tiny weights
against the CPU's; the judge; FLUX.1-dev at full size with random weights; compiled blocks,
attention backends and nf4; two GPUs; other models at full size. A failure does not end the rest.
Without a GPU, the tiny models run on the CPU alone.

Exit status: 0 = nothing failed, 1 = something did, 2 = a wrong option.
"""

import argparse
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it
ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("sample_per_s", "train_per_s", "epoch_per_s", "peak_gib", "predicted_gib", "first_ratio")


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(words)
    deadline = time.monotonic() + 60 * arguments.minutes
    import logging

    import torch

    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT)]
    from gpu_checks import full_size
    from gpu_checks.steps import run_steps
    from gpu_checks.toy import all_families

    logging.disable(logging.WARNING)  # tiny models cut every prompt
    torch.set_num_threads(1)  # tiny models need no more, and others share the cores
    families = arguments.families or all_families()
    if unknown := set(families) - set(all_families()):
        print(f"error: no family {unknown}; known: {', '.join(all_families())}", file=sys.stderr)
        return 2
    machine = describe_machine()
    print(json.dumps(machine), flush=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="paco-check-") as name:
        full = full_size.FullSize(Path(name))
        if torch.cuda.is_available() and not arguments.toy:
            full.start()
        try:
            for result in run_steps(plan(arguments, families, full), deadline):
                print(result.line(), flush=True)
                results.append(result)
        finally:
            full.close()
            logging.disable(logging.NOTSET)
    report = {"machine": machine, "results": [result.as_dict() for result in results]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown_rows(report)))
    counts = {status: 0 for status in ("passed", "failed", "skipped")}
    for result in results:
        counts[result.status] += 1
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    print(arguments.output)
    return 1 if counts["failed"] else 0


def plan(arguments: argparse.Namespace, families: list[str], full: Any) -> list[Any]:
    """All steps for this machine, the most important first."""
    import torch

    from gpu_checks import full_size, others, toy
    from gpu_checks.steps import Step

    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = toy.ToyRuns(full.folder, device)
    steps = toy.first_steps(runs, families)
    if arguments.judge:
        ask = functools.partial(others.ask_judge, arguments.judge, arguments.judge_model)
        steps.append(Step("judge", 90, ask))
    if device == "cpu":
        return steps
    at_full_size = [] if arguments.toy else full_size.steps(full)
    steps += [*at_full_size[:2], *toy.later_steps(runs)]
    if torch.cuda.device_count() > 1:
        steps += others.two_gpu_steps(full.folder)
    return [*steps, *at_full_size[2:]]


def describe_machine() -> dict[str, Any]:
    """Card, driver and versions."""
    import diffusers
    import peft
    import torch
    import transformers

    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        driver = (answer.stdout.splitlines() or [None])[0]
    libraries = (torch, diffusers, transformers, peft)
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": driver,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {library.__name__: library.__version__ for library in libraries},
    }


def markdown_rows(report: dict[str, Any]) -> list[str]:
    """Rows for docs/scaling.md: one for each model that ran at full size."""
    card = (report["machine"]["gpus"] or ["CPU"])[0]
    rows = []
    for result in report["results"]:
        figures = result["figures"]
        if "epoch_per_s" in figures:
            cells = ["–" if figures[name] is None else f"{figures[name]:.3g}" for name in COLUMNS]
            rows.append(f"| {card} | `{result['name']}` | {' | '.join(cells)} |")
    if not rows:
        return []
    names = "sampled/s | trained/s | images/s | peak GiB | estimated | first ratio"
    head = f"| card | configuration | {names} |"
    return [head, "|---|---|--:|--:|--:|--:|--:|--:|", *rows]


def parser() -> argparse.ArgumentParser:
    """The arguments of this program."""
    style = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=style, allow_abbrev=False
    )
    options.add_argument("--minutes", type=float, default=10, help="begin and end within them")
    options.add_argument("--judge", metavar="URL", help="a running judge server")
    options.add_argument("--judge_model", default="PaCo-Reward-7B", help="its name there")
    options.add_argument("--toy", action="store_true", help="no model at full size")
    options.add_argument("--families", nargs="+", help="these on tiny weights; default: all")
    output = Path("benchmarks/results/check_gpu.json")
    options.add_argument("--output", type=Path, default=output)
    return options


if __name__ == "__main__":
    sys.exit(main())
