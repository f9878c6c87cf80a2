"""The quickstart's results in numbers.

`python -m paco_toy.summary OUT RUN --seed SEED` writes summary.json and summary.txt to OUT.
"""

import argparse
import hashlib
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from paco_judge.files import read_json, read_json_lines, write_json
from paco_judge.identity import identity
from paco_judge.images import read_image
from paco_toy.oracle import evenness, read_grids, read_prompt
from paco_toy.world import ATTRIBUTES

REPO = Path(__file__).resolve().parents[2]
# What an evaluation measures -> its label. Consistency is of full prompts only: open ones have
# agreement.
MEASURES = {
    "consistency": "consistency, full prompts",
    "agreement": "agreement, open prompts",
    "choice": "diversity of open attributes",
    "reward": "the judge's score",
    "alignment": "panels show what is named",
    "valid": "valid panels",
    "distinct": "panels differ in view",
}
EDIT_MEASURES = {
    "oracle_edit": "edit score, the reward",
    "oracle_followed": "instruction followed",
    "oracle_kept": "the rest is kept",
}
LABELS = MEASURES | EDIT_MEASURES
_RESAMPLES = 400  # of the prompts


def scores_of(folder: Path) -> tuple[pd.DataFrame, list[np.ndarray]]:
    """Measures of an evaluation's images, NaN where one does not apply to the prompt.

    Also ``Reading.choices`` of each attribute.
    """
    rows = read_json_lines(folder / "eval_data.jsonl")
    rewards = pd.DataFrame([row["rewards"] for row in rows], dtype=np.float64)
    if "oracle_edit" in rewards:
        return rewards.reindex(columns=list(EDIT_MEASURES)), []
    named = [read_prompt(row["prompt"]) for row in rows]
    is_open = [bool(character.left_open) for character in named]
    reading = read_grids([read_image(folder / row["file"]) for row in rows])
    scores = {
        "consistency": np.where(is_open, np.nan, reading.consistency()),
        "agreement": reading.agreement(named),
        "reward": rewards.get("consistency_score", math.nan),
        "alignment": reading.alignment(named),
        "valid": reading.valid.mean(axis=1),
        "distinct": reading.distinctness(),
        "darkness": rewards.get("darkness", math.nan),  # of study.py
    }
    choices = [reading.choices(named, attribute) for attribute in ATTRIBUTES]
    return pd.DataFrame(scores), choices


def diversity(choices: list[np.ndarray], images: np.ndarray | slice) -> float:
    """Mean evenness of the attributes that prompts of these images leave open; NaN if none does."""
    by_attribute = [evenness(of_attribute[images]) for of_attribute in choices]
    return pd.Series(by_attribute, dtype=np.float64).mean()


def policy_measures(run: Path) -> dict[str, Any]:
    """Means of a run's first and last evaluation, ``before`` and ``after``, and their ``change``.

    A change has a ``mean`` and a ``stderr``, paired by image. ``choice`` is no mean over images:
    its standard error is over resampled prompts.
    """
    folders = sorted(path.parent for path in (run / "eval").glob("epoch_*/eval_data.jsonl"))
    if len(folders) < 2:
        raise SystemExit(
            f"{run}/eval has {len(folders)} evaluations; one before and one after training are "
            "needed"
        )
    first_scores, first_choices = scores_of(folders[0])
    last_scores, last_choices = scores_of(folders[-1])
    differences = (last_scores - first_scores).dropna(axis=1, how="all")
    before = first_scores[differences.columns].mean().to_dict()
    after = last_scores[differences.columns].mean().to_dict()
    change = {}
    for name, column in differences.items():
        change[name] = {"mean": column.mean(), "stderr": column.sem()}
    count = len(last_scores)
    every = slice(None)
    if not math.isnan(diversity(last_choices, every)):
        before["choice"] = diversity(first_choices, every)
        after["choice"] = diversity(last_choices, every)
        rng = np.random.default_rng(0)
        resampled = []
        for _ in range(_RESAMPLES):
            images = rng.integers(count, size=count)
            resampled.append(diversity(last_choices, images) - diversity(first_choices, images))
        mean = after["choice"] - before["choice"]
        change["choice"] = {"mean": mean, "stderr": float(np.nanstd(resampled))}
    config = yaml.safe_load((run / "config.yaml").read_text())
    return {
        "before": before,
        "after": after,
        "change": change,
        "train_resolution": config["train"]["resolution"],
        "test_resolution": config["test"]["resolution"],
        "epochs": int(folders[-1].name.removeprefix("epoch_")),
        "planned_epochs": config["num_epochs"],
        "num_images": count,
    }


def rank_measures(path: Path) -> dict[str, float]:
    """Means over items (`accuracy`, `kendalltau`, …)."""
    rows = [row["metrics"] for row in read_json_lines(path)]
    metrics = pd.DataFrame(rows, dtype=np.float64)
    return metrics.mean().to_dict() | {"items": len(metrics)}


def judge_measures(out: Path) -> dict[str, Any]:
    """Accuracy of the judge before and after its training, and the benchmark's measures."""
    judges = {}
    for name in ("base", "lora"):
        judges[name] = read_json(out / f"judge_{name}.json")
    rank = {}
    for path in (out / "rank_results").glob("*.jsonl"):
        if path.stem != "histogram":
            rank |= rank_measures(path)
    rank["histogram"] = rank_measures(out / "rank_results" / "histogram.jsonl")
    return {"judge": judges, "rank": rank}


def judge_id(folder: Path) -> str:
    """The first characters of the SHA-256 of its files (``paco_judge.identity``)."""
    found = identity(folder)
    if found is None:
        raise SystemExit(f"{folder} is no judge's folder")
    return found.removeprefix("sha256:")[:10]


def commit() -> str:
    """The repository's commit, with ``+`` and a hash of what differs from it except results."""
    results = "':!quickstart/results.csv' ':!quickstart/votes.csv'"
    command = f"git rev-parse --short HEAD && git diff HEAD -- . {results}"
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, cwd=REPO, check=False, capture_output=True)
    head, _, changes = done.stdout.partition(b"\n")
    if not changes:
        return head.decode() or "unknown"
    return f"{head.decode()}+{hashlib.sha256(changes).hexdigest()[:7]}"


def table(summary: dict[str, Any]) -> str:
    """The small table at the quickstart's end."""
    lines = [f"{'':<42}{'before':<13}{'after':<13}change"]

    def add(name: str, before: dict, after: dict, key: str, change: str = "") -> None:
        # The untrained judge may have no score of any pair, and then no accuracy.
        cells = ["–" if row[key] is None else f"{row[key]:.3f}" for row in (before, after)]
        lines.append(f"{name:<42}{cells[0]:<13}{cells[1]:<13}{change}".rstrip())

    if "judge" in summary:
        base = summary["judge"]["base"]
        lora = summary["judge"]["lora"]
        rank = summary["rank"]
        add("judge: accuracy, held-out pairs", base, lora, "accuracy")
        for name in lora["kinds"]:  # toy_pairs_KIND_test
            add(f"  {name.split('_')[2]}", base["kinds"][name], lora["kinds"][name], "accuracy")
        add("judge: AUC", base, lora, "auc")
        add("tau-b of histogram, of judge", rank["histogram"], rank, "kendalltau")
        lines.append("  held-out: of images that the judge was not trained on")
        lines.append("  tau-b: 1 if two rankings are the same, 0 by chance")
    policy = summary["policy"]
    lines.append(
        f"generator, {policy['test_resolution']} px, trained at {policy['train_resolution']} px"
    )
    if policy["epochs"] < policy["planned_epochs"]:
        lines.append(
            f"  --minutes stopped it after {policy['epochs']} of {policy['planned_epochs']} epochs"
        )
    for name, change in policy["change"].items():
        text = f"{change['mean']:+.3f} ±{change['stderr']:.3f}"
        add(f"  {LABELS[name]}", policy["before"], policy["after"], name, text)
    return "\n".join([*lines, "", f"{summary['minutes']:.0f} minutes."])


def main() -> None:
    """Write summary.json and summary.txt of a quickstart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of a quickstart")
    parser.add_argument("run", help="the training's folder in it")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    out = arguments.out
    seconds = {}  # of each stage
    for line in (out / "done").read_text().splitlines():
        stage, duration = line.split()
        seconds[stage] = int(duration)
    summary = {
        "seed": arguments.seed,
        "commit": commit(),
        "minutes": sum(seconds.values()) / 60,
        "stage_seconds": seconds,
        "policy": policy_measures(out / arguments.run),
    }
    if "judge" in seconds:
        summary |= judge_measures(out) | {"judge_id": judge_id(out / "judge")}
    write_json(out / "summary.json", summary)
    (out / "summary.txt").write_text(table(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
