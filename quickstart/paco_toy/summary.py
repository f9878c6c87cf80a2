"""The quickstart's results in numbers: `python -m paco_toy.summary OUT RUN` writes summary.json and summary.txt to OUT."""

import argparse
import hashlib
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from paco_judge.images import read_image
from paco_toy.oracle import evenness, read_grids, read_prompt
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
EDIT_MEASURES = {
    "oracle_edit": "edit score, the reward",
    "oracle_followed": "instruction followed",
    "oracle_kept": "the rest is kept",
}
LABELS = MEASURES | EDIT_MEASURES


def scores_of(folder: Path) -> tuple[pd.DataFrame, list[np.ndarray]]:
    """Measures of an evaluation's images, NaN where one does not apply to the prompt; ``Reading.choices`` by attribute."""
    rows = read_jsonl(folder / "eval_data.jsonl")
    rewards = pd.DataFrame([row["rewards"] for row in rows], dtype=np.float64)
    if "oracle_edit" in rewards:
        return rewards.reindex(columns=list(EDIT_MEASURES)), []
    if any(row["file"] is None for row in rows):
        raise SystemExit(
            f"{folder} has no images for the oracle to read: leave test.save_eval_images=True"
        )
    named = [read_prompt(row["prompt"]) for row in rows]
    reading = read_grids([read_image(folder / row["file"]) for row in rows])
    scores = {
        "consistency": np.where([bool(c.left_open) for c in named], np.nan, reading.consistency()),
        "agreement": reading.agreement(named),
        "reward": rewards.get("consistency_score", math.nan),
        "alignment": reading.alignment(named),
        "valid": reading.valid.mean(axis=1),
        "distinct": reading.distinctness(),
    }
    return pd.DataFrame(scores), [reading.choices(named, name) for name in ATTRIBUTES]


def diversity(choices: list[np.ndarray], images: np.ndarray | slice) -> float:
    """Mean evenness of the attributes that prompts of these images leave open; NaN if there is none."""
    return pd.Series([evenness(each[images]) for each in choices], dtype=np.float64).mean()


def policy_measures(run: Path) -> dict[str, Any]:
    """``before`` and ``after``: means of a run's first and last evaluation; ``change``: paired ``mean`` and ``stderr``.

    The standard error of ``choice``, which is no mean over images, is over resampled prompts.
    """
    folders = sorted(path.parent for path in (run / "eval").glob("epoch_*/eval_data.jsonl"))
    if len(folders) < 2:
        raise SystemExit(
            f"{run}/eval has {len(folders)} evaluations; one before and one after training are needed"
        )
    (before, first), (after, last) = scores_of(folders[0]), scores_of(folders[-1])
    change, count = (after - before).dropna(axis=1, how="all"), len(after)
    found = {
        "before": before[change.columns].mean().to_dict(),
        "after": after[change.columns].mean().to_dict(),
    }
    found["change"] = {
        name: {"mean": each.mean(), "stderr": each.sem()} for name, each in change.items()
    }
    every, rng = slice(None), np.random.default_rng(0)
    if not math.isnan(diversity(last, every)):
        found["before"]["choice"], found["after"]["choice"] = (
            diversity(first, every),
            diversity(last, every),
        )
        drawn = [rng.integers(count, size=count) for _ in range(400)]
        error = np.nanstd([diversity(last, images) - diversity(first, images) for images in drawn])
        mean = found["after"]["choice"] - found["before"]["choice"]
        found["change"]["choice"] = {"mean": mean, "stderr": float(error)}
    config = yaml.safe_load((run / "config.yaml").read_text())
    found |= {f"{part}_resolution": config[part]["resolution"] for part in ("train", "test")}
    return found | {"epochs": int(folders[-1].name.removeprefix("epoch_")), "num_images": count}


def rank_measures(path: Path) -> dict[str, float]:
    """Means over items (`accuracy`, `kendalltau`, …)."""
    metrics = pd.DataFrame(
        [row["metrics"] for row in read_jsonl(path) if not row.get("error")], dtype=np.float64
    )
    return metrics.mean().to_dict() | {"items": len(metrics)}


def judge_measures(out: Path) -> dict[str, Any]:
    judged = {
        name: json.loads((out / f"judge_{name}.json").read_text()) for name in ("base", "lora")
    }
    ranks = {
        path.stem == "histogram": rank_measures(path)
        for path in (out / "rank_results").glob("*.jsonl")
    }
    return {"judge": judged, "rank": ranks[False] | {"histogram": ranks[True]}}


def judge_id(folder: Path) -> str:
    """The first characters of the SHA-256 of its weights."""
    weights = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(weights).hexdigest()[:10]


def commit() -> str:
    """The repository's commit, with `+changes` if files other than results.csv differ from it."""
    command = (
        "git rev-parse --short HEAD && git status --porcelain -uno -- . ':!quickstart/results.csv'"
    )
    found = subprocess.run(
        ["bash", "-c", command], cwd=REPO, check=False, capture_output=True, text=True
    )
    head, *changes = found.stdout.splitlines() or ["unknown"]
    return head + ("+changes" if changes else "")


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
    lines.append(
        f"generator, {policy['test_resolution']} px, trained at {policy['train_resolution']} px"
    )
    for name, change in policy["change"].items():
        add(
            f"  {LABELS[name]}",
            policy["before"],
            policy["after"],
            name,
            f"{change['mean']:+.3f} ±{change['stderr']:.3f}",
        )
    return "\n".join([*lines, "", f"{summary['minutes']:.0f} minutes."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of a quickstart")
    parser.add_argument("run", help="the training's folder in it")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    out = arguments.out
    seconds = {
        name: int(value) for name, value in map(str.split, (out / "done").read_text().splitlines())
    }
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
