"""The quickstart's results in numbers: `python -m paco_toy.summary OUT [--editing]` writes summary.json and summary.txt there."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paco_judge.images import read_image
from paco_toy.oracle import Reading, read_grids, read_prompt
from paco_toy.world import ATTRIBUTES, Character

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
_RESAMPLES = 400  # of the prompts, for the standard error of the diversity
PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "llamafactory", "numpy")


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Evaluation:
    """The images of one evaluation folder, as the oracle reads them, and what the judge said of them.

    Attributes:
        named: What each image's prompt names, with what it leaves open.
        reading: Of the B images.
        scores: Measure -> float64 (B,), NaN where a measure does not apply to the prompt.
    """

    named: tuple[Character, ...]
    reading: Reading
    scores: dict[str, np.ndarray]

    @classmethod
    def of(cls, folder: Path) -> Evaluation:
        """Reads ``eval_data.jsonl`` and the images beside it. Raises SystemExit if they were not saved."""
        rows = read_rows(folder / "eval_data.jsonl")
        if any(row["file"] is None for row in rows):
            raise SystemExit(f"{folder} has no images for the oracle to read: leave test.save_eval_images=True")
        named = tuple(read_prompt(row["prompt"])[0] for row in rows)
        reading = read_grids([read_image(folder / row["file"]) for row in rows])
        is_open = np.array([bool(character.left_open) for character in named])
        scores = {
            "consistency": np.where(is_open, np.nan, reading.consistency()),
            "agreement": reading.agreement(named),
            "reward": np.array([row["rewards"].get("consistency_score") for row in rows], dtype=np.float64),
            "alignment": reading.alignment(named),
            "valid": reading.valid.mean(axis=1),
            "distinct": reading.distinctness(),
        }
        return cls(named, reading, scores)

    def choice(self, rows: np.ndarray | slice = slice(None)) -> float:
        """Mean of ``Reading.choice`` over the attributes that the prompts of these images leave open; NaN if there is none."""
        reading = self.reading.of(rows)
        named = [self.named[i] for i in np.arange(len(self.named))[rows]]
        values = [value for name in ATTRIBUTES if not math.isnan(value := reading.choice(named, name))]
        return float(np.mean(values)) if values else math.nan

    def means(self) -> dict[str, float]:
        """Measure -> its mean over the images that it applies to; without measures that apply to none."""
        means = {name: float(np.nanmean(values)) for name, values in self.scores.items() if not np.isnan(values).all()}
        means |= {} if math.isnan(choice := self.choice()) else {"choice": choice}
        return {name: means[name] for name in MEASURES if name in means}


def paired(difference: np.ndarray) -> dict[str, float]:
    """``mean`` and ``stderr`` of differences, without those that are NaN."""
    difference = difference[~np.isnan(difference)]
    return {"mean": float(difference.mean()), "stderr": float(difference.std(ddof=1) / math.sqrt(len(difference)))}


def changes(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    """Measure -> ``mean`` and paired ``stderr`` of after − before, for two evaluations of the same prompts and noise.

    The standard error of ``choice``, which is no mean over images, is over resampled prompts.
    """
    found = {}
    for name in after.means():
        if name == "choice":
            rng, count = np.random.default_rng(0), len(before.named)
            drawn = (rng.integers(count, size=count) for _ in range(_RESAMPLES))
            stderr = np.nanstd([after.choice(rows) - before.choice(rows) for rows in drawn])
            found[name] = {"mean": after.choice() - before.choice(), "stderr": float(stderr)}
        else:
            found[name] = paired(after.scores[name] - before.scores[name])
    return found


def _with_facts(run: Path, measure: Callable[[Path, Path], dict[str, Any]]) -> dict[str, Any]:
    """``measure`` of a run's first and last evaluation, epochs, images and resolutions. Raises SystemExit without two of them."""
    folders = sorted(path.parent for path in (run / "eval").glob("epoch_*/eval_data.jsonl"))
    if len(folders) < 2:
        raise SystemExit(f"{run}/eval has {len(folders)} evaluations; one before and one after training are needed")
    config = yaml.safe_load((run / "config.yaml").read_text())
    facts = {"epochs": int(folders[-1].name.removeprefix("epoch_")), "num_images": len(read_rows(folders[-1] / "eval_data.jsonl"))}
    return measure(folders[0], folders[-1]) | facts | {f"{part}_resolution": config[part]["resolution"] for part in ("train", "test")}


def policy_measures(run: Path) -> dict[str, Any]:
    """``before`` and ``after``: means of a run's first and last evaluation; ``change`` between them; facts about the run."""

    def measure(first: Path, last: Path) -> dict[str, Any]:
        before, after = Evaluation.of(first), Evaluation.of(last)
        return {"before": before.means(), "after": after.means(), "change": changes(before, after)}

    return _with_facts(run, measure)


def edit_measures(run: Path) -> dict[str, Any]:
    """The same of an editor's run: means of the oracle's rewards."""

    def measure(first: Path, last: Path) -> dict[str, Any]:
        found: dict[str, Any] = {"before": {}, "after": {}, "change": {}}
        for name in EDIT_MEASURES:
            before, after = (np.array([row["rewards"].get(name) for row in read_rows(folder / "eval_data.jsonl")], dtype=np.float64)
                             for folder in (first, last))  # fmt: skip
            found["before"][name], found["after"][name] = float(np.nanmean(before)), float(np.nanmean(after))
            found["change"][name] = paired(after - before)
        return found

    return _with_facts(run, measure)


def rank_measures(path: Path) -> dict[str, float]:
    """Means over items of every number in a results file (`accuracy`, `kendalltau`, …)."""
    rows = [row["metrics"] for row in read_rows(path) if not row.get("error")]
    values = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}  # None: NaN
    return {name: float(np.nanmean(value)) for name, value in values.items()} | {"items": len(rows)}


def judge_measures(out: Path) -> dict[str, Any]:
    """The judge's accuracy before and after its training, and its rankings."""
    judged = {name: json.loads((out / f"judge_{name}.json").read_text()) for name in ("base", "lora")}
    files = sorted((out / "rank_results").glob("*.jsonl"))
    ranks = {path.stem == "histogram": rank_measures(path) for path in files}
    return {"judge": judged, "rank": ranks[False] | {"histogram": ranks[True]}}


def judge_id(folder: Path) -> str:
    """The first characters of the SHA-256 of a judge's weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def commit() -> str:
    """The repository's commit, with `+changes` if files differ from it; results.csv, which the study itself writes, may."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", REPO, *command], check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!quickstart/results.csv")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        return "unknown"


def table(summary: dict[str, Any], labels: dict[str, str]) -> str:
    """The small table at the end."""
    rows = [("", "before", "after", "change")]
    if "judge" in summary:
        base, lora, rank = summary["judge"]["base"], summary["judge"]["lora"], summary["rank"]
        rows.append(("judge: accuracy, held-out pairs", f"{base['accuracy']:.3f}", f"{lora['accuracy']:.3f}", ""))
        for name, kind in lora["kinds"].items():  # toy_pairs_KIND_test
            rows.append((f"  {name.split('_')[2]}", f"{base['kinds'][name]['accuracy']:.3f}", f"{kind['accuracy']:.3f}", ""))
        rows.append(("judge: AUC", f"{base['auc']:.3f}", f"{lora['auc']:.3f}", ""))
        rows.append(("tau-b of histogram, of judge", f"{rank['histogram']['kendalltau']:.3f}", f"{rank['kendalltau']:.3f}", ""))
    policy = summary["policy"]
    rows.append((f"generator, {policy['test_resolution']} px, trained at {policy['train_resolution']} px", "", "", ""))
    for name, change in policy["change"].items():
        values = (f"{policy[when][name]:.3f}" for when in ("before", "after"))
        rows.append((f"  {labels[name]}", *values, f"{change['mean']:+.3f} ±{change['stderr']:.3f}"))
    width = max(len(row[0]) for row in rows)
    lines = ["  ".join([f"{row[0]:<{width}}", *(f"{cell:<13}" for cell in row[1:])]).rstrip() for row in rows]
    return "\n".join([*lines, "", f"{summary['minutes']:.0f} minutes, peak memory {summary['peak_rss_mb']} MB."])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of a quickstart")
    parser.add_argument("--editing", action="store_true", help="of editing.sh, not of run.sh")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    out = arguments.out
    seconds = {name: int(value) for name, value in map(str.split, (out / "done").read_text().splitlines())}
    (out / "stage_seconds.json").write_text(json.dumps(seconds))
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    summary = {
        "seed": arguments.seed, "commit": commit(), "minutes": sum(seconds.values()) / 60, "stage_seconds": seconds,
        "peak_rss_mb": int((out / "peak_mb").read_text()), "versions": versions,
    }  # fmt: skip
    if arguments.editing:
        summary["policy"] = edit_measures(out / "run")
    else:
        summary |= judge_measures(out) | {"policy": policy_measures(out / "runs" / "toy_t2is_awm"), "judge_id": judge_id(out / "judge")}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "summary.txt").write_text(table(summary, EDIT_MEASURES if arguments.editing else MEASURES) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
