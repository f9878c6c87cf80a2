"""Compares the judge's losses on answers of several lengths. Run by hand, after quickstart/run.sh has made the world.

    .venv/bin/python quickstart/judge_study.py                          # nine trainings of 4 minutes
    .venv/bin/python quickstart/judge_study.py --lengths 20 --seeds 0 1 2
    .venv/bin/python quickstart/judge_study.py --only table             # table and figure again from finished runs

Losses (docs/method.md §3): `sequence` and `released` with first_token_weight 0.1, `null` (LLaMA-Factory's mean over all
answer tokens). An answer's reason is written with about 5, 20 or 60 tokens. Everything else is config/toy_reward_lora.yaml.
All are measured on the pairs of held-out characters: accuracy, AUC and expected calibration error of P(Yes).
quickstart/judge_study.json has the results of finished runs, which are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paco_grpo.report.style import new_figure, save_png, styled
from paco_toy.processes import Commands, QuickstartError
from paco_toy.reward_data import TESTS, TRAIN
from paco_toy.stages import BASE, DATA

REPO = Path(__file__).resolve().parent.parent
REWARD = REPO / "PaCo-Reward"
OUT = REPO / "quickstart" / "out" / "judge_study"
RESULTS = REPO / "quickstart" / "judge_study.json"
LENGTHS = (5, 20, 60)
LOSSES = {
    "sequence": ["first_token_weight=0.1", "first_token_scheme=sequence"],
    "released": ["first_token_weight=0.1", "first_token_scheme=released"],
    "null": ["first_token_weight=null"],
}
KEYS = ("accuracy", "auc", "ece")
COMMANDS = Commands(OUT, lambda what, fraction, text: None)


def lengthened(answer: str, length: int) -> str:
    """An answer of the toy judge's data with a reason of about ``length`` (one of LENGTHS) tokens."""
    verdict, first, second = re.match(r"(Yes|No)\. (?:Both show|First) (.*?)(?:, second (.*))?\.$", answer).groups()
    second = second or first
    shapes = f"{first.split()[-1]}, {second.split()[-1]}."
    whole, back = f"First {first}, second {second}.", f"Second {second}, first {first}."
    attributes = " ".join(f"First {a}, second {b}." for a, b in zip(first.split()[1:], second.split()[1:]))
    reasons = {5: shapes, 20: f"{whole} {shapes}", 60: f"{whole} {attributes} {back} {attributes}"}
    return f"{verdict}. {reasons[length]}"


def data(length: int) -> str:
    """A folder with the training pairs, answers of this length, as seen from PaCo-Reward."""
    world, folder = (REWARD / DATA).resolve(), OUT / f"data_{length}"
    shutil.rmtree(folder, ignore_errors=True)  # of another world
    folder.mkdir(parents=True)
    rows = json.loads((world / f"{TRAIN}.json").read_text())
    for row in rows:
        row["messages"][1]["content"] = lengthened(row["messages"][1]["content"], length)
    (folder / f"{TRAIN}.json").write_text(json.dumps(rows))
    shutil.copy(world / "dataset_info.json", folder)
    (folder / "images").symlink_to(world / "images")
    return os.path.relpath(folder, REWARD)


def measure(name: str, *adapter: str) -> dict[str, float]:
    """Accuracy, AUC and calibration error of the base, or of the base with an adapter."""
    output = OUT / f"{name}.json"
    command = [Path(sys.executable).parent / "paco-reward", "accuracy", "--model", BASE, *adapter, "--dataset_dir", DATA,
               "--dataset", ",".join(TESTS), "--output", output]  # fmt: skip
    COMMANDS.run(command, REWARD, f"{name}.accuracy", f"accuracy of {name}")
    found = json.loads(output.read_text())
    return {key: found[key] for key in KEYS}


def train(loss: str, length: int, seed: int) -> dict[str, float]:
    """One training with the published command, then its measure."""
    name = f"{loss}-{length}-seed{seed}"
    folder = os.path.relpath(OUT / name, REWARD)
    shutil.rmtree(OUT / name, ignore_errors=True)
    command = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml", *LOSSES[loss], f"seed={seed}",
               f"data_seed={seed}", f"dataset_dir={data(length)}", f"output_dir={folder}"]  # fmt: skip
    COMMANDS.run(command, REWARD, name, f"training of {name}", env={"PYTHON": sys.executable})
    return measure(name, "--adapter", folder)


def table(results: Sequence[Mapping]) -> str:
    """The finished runs as Markdown."""
    base = next(result for result in results if result["loss"] == "base")
    lines = ["| loss | tokens of a reason | accuracy | AUC | calibration error |", "|---" * 5 + "|"]
    lines.append(f"| base, no LoRA | | {' | '.join(f'{base[key]:.3f}' for key in KEYS)} |")
    for loss, length in itertools.product(LOSSES, LENGTHS):
        found = [result for result in results if (result["loss"], result.get("length")) == (loss, length)]
        if found:
            values = [[row[key] for row in found] for key in KEYS]
            each = (f" ({', '.join(f'{x:.3f}' for x in v)})" if len(v) > 1 else "" for v in values)
            cells = [f"{np.mean(v):.3f}{seeds}" for v, seeds in zip(values, each)]
            lines.append(f"| `{loss}` | {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(results: Sequence[Mapping], path: Path) -> None:
    """Mean accuracy by the length of reasons, a line for each loss."""
    drawn = new_figure(5, 3.6)
    axis = drawn.subplots()
    for loss in LOSSES:
        own = {length: [r["accuracy"] for r in results if (r["loss"], r.get("length")) == (loss, length)] for length in LENGTHS}
        points = [(length, np.mean(found)) for length, found in own.items() if found]
        if points:
            axis.plot(*zip(*points), marker="o", label=loss)
    axis.set_xscale("log")
    axis.set_xticks(LENGTHS, map(str, LENGTHS))
    axis.set_xlabel("tokens of a reason")
    axis.set_ylabel("accuracy, held-out pairs")
    axis.legend()
    save_png(drawn, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--only", choices=["table"])
    arguments = parser.parse_args()
    if not (REPO / "quickstart/out/world/reward_data/dataset_info.json").exists() and not arguments.only:
        raise SystemExit("quickstart/out/world/reward_data is missing; make it with: bash quickstart/run.sh")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []

    def keep(result: dict) -> None:
        print(result, flush=True)
        results.append(result)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")

    try:
        if arguments.only is None:
            if not results:
                keep({"loss": "base"} | measure("base"))
            for seed, length, loss in itertools.product(arguments.seeds, arguments.lengths, LOSSES):
                run = {"loss": loss, "length": length, "seed": seed}
                if not any(run.items() <= result.items() for result in results):
                    keep(run | train(loss, length, seed))
    except QuickstartError as error:
        raise SystemExit(str(error)) from None
    finally:
        COMMANDS.stop()
    if not results:
        raise SystemExit("no run has finished")
    print(table(results))
    with styled():
        figure(results, REPO / "assets" / "judge_losses.png")


if __name__ == "__main__":
    main()
