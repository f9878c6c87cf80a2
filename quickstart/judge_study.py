"""Compares the losses of the judge over seeds, run by hand after quickstart/run.sh has made the world.

    .venv/bin/python quickstart/judge_study.py                # base, and LoRA with three losses, three seeds each
    .venv/bin/python quickstart/judge_study.py --only table   # the table again from finished runs

Losses (method §3): `sequence` and `released` with first_token_weight 0.1, `null` (LLaMA-Factory's own mean over all
answer tokens). Everything else is config/toy_reward_lora.yaml. A finished run is not run again. All are measured on the
pairs of held-out characters: accuracy, AUC and expected calibration error of P(Yes).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
REWARD = REPO / "PaCo-Reward"
OUT = REPO / "quickstart" / "out" / "judge_study"
LOSSES = {
    "sequence": ["first_token_weight=0.1", "first_token_scheme=sequence"],
    "released": ["first_token_weight=0.1", "first_token_scheme=released"],
    "null": ["first_token_weight=null"],
}
BASE = "../quickstart/models/judge"
DATA = "../quickstart/out/world/reward_data"


def _run(command: list[str], log: Path) -> None:
    with log.open("w") as file:
        environment = {**os.environ, "PYTHON": sys.executable}
        status = subprocess.run(command, cwd=REWARD, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if status.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"{' '.join(command)} failed; the end of {log}:\n{end}")


def measure(name: str, *adapter: str) -> dict[str, float]:
    """Accuracy, AUC and calibration error of the base, or of the base with an adapter; kept in OUT/NAME.json."""
    output = OUT / f"{name}.json"
    if not output.exists():
        command = [str(Path(sys.executable).parent / "paco-reward"), "accuracy", "--model", BASE, *adapter, "--dataset_dir", DATA,
                   "--dataset", "toy_pairs_cot_test", "--output", str(output)]  # fmt: skip
        _run(command, OUT / f"{name}.accuracy.log")
    return json.loads(output.read_text())


def train(loss: str, seed: int) -> dict[str, float]:
    """One training with the published command, then its measure."""
    name = f"{loss}-seed{seed}"
    folder = OUT / name
    if not (OUT / f"{name}.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml", *LOSSES[loss], f"seed={seed}", f"data_seed={seed}",
                   f"output_dir={os.path.relpath(folder, REWARD)}"]  # fmt: skip
        _run(command, OUT / f"{name}.log")
    return measure(name, "--adapter", os.path.relpath(folder, REWARD))


def table(seeds: list[int]) -> str:
    """The finished runs as Markdown."""
    lines = ["| loss | accuracy | AUC | calibration error |", "|---|---|---|---|"]
    base = measure("base")
    lines.append(f"| base, no LoRA | {base['accuracy']:.3f} | {base['auc']:.3f} | {base['ece']:.3f} |")
    for loss in LOSSES:
        found = [json.loads(file.read_text()) for seed in seeds if (file := OUT / f"{loss}-seed{seed}.json").exists()]
        if not found:
            continue
        cells = []
        for key in ("accuracy", "auc", "ece"):
            values = np.array([row[key] for row in found])
            cells.append(f"{values.mean():.3f} ({', '.join(f'{v:.3f}' for v in values)})")
        lines.append(f"| `{loss}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["table"])
    arguments = parser.parse_args()
    if not (REPO / "quickstart/out/world/reward_data/dataset_info.json").exists():
        raise SystemExit("quickstart/out/world/reward_data is not there; make it with: bash quickstart/run.sh")
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.only is None:
        print(f"base: {measure('base')}", flush=True)
        for seed in arguments.seeds:
            for loss in LOSSES:
                found = train(loss, seed)
                print(f"{loss}, seed {seed}: accuracy {found['accuracy']:.3f}, AUC {found['auc']:.3f}", flush=True)
    text = table(arguments.seeds)
    (OUT / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
