"""Compares the judge's losses over seeds. Run by hand, after quickstart/run.sh has made the world.

    .venv/bin/python quickstart/judge_study.py                # base, and LoRA with three losses, three seeds each
    .venv/bin/python quickstart/judge_study.py --only table   # the table again from finished runs

Losses (docs/method.md §3): `sequence` and `released` with first_token_weight 0.1, `null` (LLaMA-Factory's mean over all
answer tokens). Everything else is config/toy_reward_lora.yaml. A finished run is not run again. All are measured on the
pairs of held-out characters: accuracy, AUC and expected calibration error of P(Yes).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from paco_toy.processes import Commands, QuickstartError
from paco_toy.reward_data import TESTS
from paco_toy.stages import BASE, DATA

REPO = Path(__file__).resolve().parent.parent
REWARD = REPO / "PaCo-Reward"
OUT = REPO / "quickstart" / "out" / "judge_study"
LOSSES = {
    "sequence": ["first_token_weight=0.1", "first_token_scheme=sequence"],
    "released": ["first_token_weight=0.1", "first_token_scheme=released"],
    "null": ["first_token_weight=null"],
}
KEYS = ("accuracy", "auc", "ece")
COMMANDS = Commands(OUT, lambda what, fraction, text: None)


def measure(name: str, *adapter: str) -> dict[str, float]:
    """Accuracy, AUC and calibration error of the base, or of the base with an adapter; kept in OUT/NAME.json."""
    output = OUT / f"{name}.json"
    if not output.exists():
        command = [Path(sys.executable).parent / "paco-reward", "accuracy", "--model", BASE, *adapter, "--dataset_dir", DATA,
                   "--dataset", ",".join(TESTS), "--output", output]  # fmt: skip
        COMMANDS.run(command, REWARD, f"{name}.accuracy", f"accuracy of {name}")
    return json.loads(output.read_text())


def train(loss: str, seed: int) -> dict[str, float]:
    """One training with the published command, then its measure."""
    name = f"{loss}-seed{seed}"
    folder = os.path.relpath(OUT / name, REWARD)
    if not (OUT / f"{name}.json").exists():
        shutil.rmtree(OUT / name, ignore_errors=True)
        command = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml", *LOSSES[loss], f"seed={seed}",
                   f"data_seed={seed}", f"output_dir={folder}"]  # fmt: skip
        COMMANDS.run(command, REWARD, name, f"training of {name}", env={"PYTHON": sys.executable})
    return measure(name, "--adapter", folder)


def table(seeds: list[int]) -> str:
    """The finished runs as Markdown."""
    base = measure("base")
    lines = ["| loss | accuracy | AUC | calibration error |", "|---|---|---|---|"]
    lines.append(f"| base, no LoRA | {' | '.join(f'{base[key]:.3f}' for key in KEYS)} |")
    for loss in LOSSES:
        found = [json.loads(file.read_text()) for seed in seeds if (file := OUT / f"{loss}-seed{seed}.json").exists()]
        if found:
            values = [[row[key] for row in found] for key in KEYS]
            cells = [f"{np.mean(v):.3f} ({', '.join(f'{x:.3f}' for x in v)})" for v in values]
            lines.append(f"| `{loss}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["table"])
    arguments = parser.parse_args()
    if not (REPO / "quickstart/out/world/reward_data/dataset_info.json").exists():
        raise SystemExit("quickstart/out/world/reward_data is missing; make it with: bash quickstart/run.sh")
    try:
        if arguments.only is None:
            print(f"base: {measure('base')}", flush=True)
            for seed in arguments.seeds:
                for loss in LOSSES:
                    found = train(loss, seed)
                    print(f"{loss}, seed {seed}: accuracy {found['accuracy']:.3f}, AUC {found['auc']:.3f}", flush=True)
        text = table(arguments.seeds)
    except QuickstartError as error:
        raise SystemExit(str(error)) from None
    finally:
        COMMANDS.stop()
    (OUT / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
