"""The quickstart's results in numbers: `python -m paco_toy.summary OUT RUN` writes summary.json and summary.txt to OUT."""

import argparse
import hashlib
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from paco_judge.images import read_image
from paco_toy.oracle import read_grids, read_prompt
from paco_toy.world import ATTRIBUTES, read_jsonl

REPO = Path(__file__).resolve().parents[2]
# What an evaluation measures -> its label. Consistency is of full prompts only: open ones have agreement.
MEASURES = {
    "consistency": "consistency, full prompts",
    "agreement": "agreement, open prompts",
    "choice": "diversity of open attributes",
    "reward": "the judge's score",
    "alignment": "panels show what is named",
    "valid": "valid panels",
    "distinct": "panels differ in view",
}
EDIT_MEASURES = {"oracle_edit": "edit score, the reward", "oracle_followed": "instruction followed", "oracle_kept": "the rest is kept"}
LABELS = MEASURES | EDIT_MEASURES


def scores_of(folder: Path) -> tuple[dict[str, np.ndarray], Callable[[np.ndarray], float]]:
    """Measures of the images of an evaluation folder.

    Returns:
        Measure -> float64 (B,), NaN where it does not apply to the prompt; and a function from indices of images, int
        (N,), to their diversity: the mean of ``Reading.choice`` over the attributes that their prompts leave open, NaN
        if there is none.
    """
    rows = read_jsonl(folder / "eval_data.jsonl")

    def rewards(name: str) -> np.ndarray:
        return np.array([row["rewards"].get(name) for row in rows], dtype=np.float64)

    if "oracle_edit" in rows[0]["rewards"]:
        return {name: rewards(name) for name in EDIT_MEASURES}, lambda some: math.nan
    named = [read_prompt(row["prompt"]) for row in rows]
    reading = read_grids([read_image(folder / row["file"]) for row in rows])
    scores = {
        "consistency": np.where([bool(c.left_open) for c in named], np.nan, reading.consistency()),
        "agreement": reading.agreement(named),
        "reward": rewards("consistency_score"),
        "alignment": reading.alignment(named),
        "valid": reading.valid.mean(axis=1),
        "distinct": reading.distinctness(),
    }

    def choice(some: np.ndarray) -> float:
        values = [reading.of(some).choice([named[i] for i in some], name) for name in ATTRIBUTES]
        return float(np.mean(known)) if (known := [value for value in values if not math.isnan(value)]) else math.nan

    return scores, choice


def policy_measures(run: Path) -> dict[str, Any]:
    """``before`` and ``after``: means of a run's first and last evaluation; ``change``: paired ``mean`` and ``stderr``.

    The standard error of ``choice``, which is no mean over images, is over resampled prompts.
    """
    folders = sorted(path.parent for path in (run / "eval").glob("epoch_*/eval_data.jsonl"))
    if len(folders) < 2:
        raise SystemExit(f"{run}/eval has {len(folders)} evaluations; one before and one after training are needed")
    (before, choice_before), (after, choice_after) = scores_of(folders[0]), scores_of(folders[-1])
    count = len(next(iter(after.values())))
    found: dict[str, dict] = {"before": {}, "after": {}, "change": {}}
    for name in LABELS:
        if name == "choice" and not math.isnan(last := choice_after(np.arange(count))):
            first, rng = choice_before(np.arange(count)), np.random.default_rng(0)
            drawn = (rng.integers(count, size=count) for _ in range(400))
            change, error = last - first, np.nanstd([choice_after(rows) - choice_before(rows) for rows in drawn])
        elif name in after and not np.isnan(after[name]).all():
            first, last = np.nanmean(before[name]), np.nanmean(after[name])
            difference = after[name] - before[name]
            difference = difference[~np.isnan(difference)]
            change, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
        else:
            continue
        found["before"][name], found["after"][name] = float(first), float(last)
        found["change"][name] = {"mean": float(change), "stderr": float(error)}
    config = yaml.safe_load((run / "config.yaml").read_text())
    found |= {f"{part}_resolution": config[part]["resolution"] for part in ("train", "test")}
    return found | {"epochs": int(folders[-1].name.removeprefix("epoch_")), "num_images": count}


def rank_measures(path: Path) -> dict[str, float]:
    """Means over items of every number in a results file (`accuracy`, `kendalltau`, …)."""
    metrics = pd.DataFrame([row["metrics"] for row in read_jsonl(path) if not row.get("error")], dtype=np.float64)
    return metrics.mean().to_dict() | {"items": len(metrics)}


def judge_measures(out: Path) -> dict[str, Any]:
    """The judge's accuracy before and after its training, and its rankings."""
    judged = {name: json.loads((out / f"judge_{name}.json").read_text()) for name in ("base", "lora")}
    ranks = {path.stem == "histogram": rank_measures(path) for path in (out / "rank_results").glob("*.jsonl")}
    return {"judge": judged, "rank": ranks[False] | {"histogram": ranks[True]}}


def judge_id(folder: Path) -> str:
    """The first characters of the SHA-256 of a judge's weights."""
    weights = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(weights).hexdigest()[:10]


def commit() -> str:
    """The repository's commit, with `+changes` if files differ from it; results.csv, which the study itself writes, may."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", REPO, *command], check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!quickstart/results.csv")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        return "unknown"


def table(summary: dict[str, Any]) -> str:
    """The small table at the quickstart's end."""
    lines = [f"{'':<42}{'before':<13}{'after':<13}change"]

    def add(name: str, before: dict, after: dict, key: str, change: str = "") -> None:
        lines.append(f"{name:<42}{before[key]:<13.3f}{after[key]:<13.3f}{change}".rstrip())

    if "judge" in summary:
        base, lora, rank = summary["judge"]["base"], summary["judge"]["lora"], summary["rank"]
        add("judge: accuracy, held-out pairs", base, lora, "accuracy")
        for name in lora["kinds"]:  # toy_pairs_KIND_test
            add(f"  {name.split('_')[2]}", base["kinds"][name], lora["kinds"][name], "accuracy")
        add("judge: AUC", base, lora, "auc")
        add("tau-b of histogram, of judge", rank["histogram"], rank, "kendalltau")
    policy = summary["policy"]
    lines.append(f"generator, {policy['test_resolution']} px, trained at {policy['train_resolution']} px")
    for name, change in policy["change"].items():
        add(f"  {LABELS[name]}", policy["before"], policy["after"], name, f"{change['mean']:+.3f} ±{change['stderr']:.3f}")
    return "\n".join([*lines, "", f"{summary['minutes']:.0f} minutes."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of a quickstart")
    parser.add_argument("run", help="the training's folder in it")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    out = arguments.out
    seconds = {name: int(value) for name, value in map(str.split, (out / "done").read_text().splitlines())}
    (out / "stage_seconds.json").write_text(json.dumps(seconds))
    summary = {
        "seed": arguments.seed, "commit": commit(), "minutes": sum(seconds.values()) / 60, "stage_seconds": seconds,
        "policy": policy_measures(out / arguments.run),
    }  # fmt: skip
    if "judge" in seconds:
        summary |= judge_measures(out) | {"judge_id": judge_id(out / "judge")}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "summary.txt").write_text(table(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
