"""summary.json: the results of a quickstart in numbers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paco_toy.console import columns
from paco_toy.processes import QuickstartError

# summary key -> name of the evaluation's reward
MEASURES = {
    "oracle_consistency": "oracle_consistency", "reward": "consistency_score", "alignment": "oracle_alignment",
    "view": "oracle_view", "valid": "oracle_valid", "distinct": "oracle_distinct",
}  # fmt: skip
STDERRS = {"oracle_consistency": "stderr", "reward": "reward_stderr"}
PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "llamafactory", "numpy")


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON-lines file; a truncated line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def policy_measures(run: Path) -> dict[str, dict[str, float]]:
    """``before`` and ``after``: the first and the last evaluation of a run, with ``stderr`` (of oracle_consistency) and ``epoch``.

    Raises:
        QuickstartError: The run has fewer than two evaluations, or one lacks a measure.
    """
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("phase") == "eval"]
    if len(rows) < 2:
        needed = "one before and one after training are needed"
        raise QuickstartError(f"{run}/metrics.jsonl has {len(rows)} evaluations; {needed}")
    result = {}
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        missing = [name for name in MEASURES.values() if f"eval/{name}_mean" not in row]
        if missing:
            raise QuickstartError(f"the evaluation of epoch {row['epoch']} lacks {', '.join(missing)} (see {run})")
        result[when] = {key: row[f"eval/{name}_mean"] for key, name in MEASURES.items()}
        result[when] |= {error: row[f"eval/{MEASURES[key]}_stderr"] for key, error in STDERRS.items()}
        result[when] |= {"epoch": row["epoch"], "num_images": row["eval/num_images"]}
    return result


def versions(repo: Path) -> dict[str, str]:
    """Versions of Python and the main packages, and the commit (with `+changes`)."""
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}

    command = ["git", "-C", repo, "describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        found["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        found["commit"] = "unknown"
    return found


def build(
    results: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float], peak_rss_mb: int, seed: int, repo: Path
) -> dict:
    """The whole summary from the stages' results."""
    judge, rl = results["judge"], results["rl"]
    return {
        "judge": {which: judge[which] for which in ("base", "lora")},
        "rank": results["rank"],
        "policy": {when: rl[when] for when in ("before", "after")},
        "train_resolution": rl["train_resolution"],
        "test_resolution": rl["test_resolution"],
        "engine": results["server"]["engine"],
        "stage_seconds": {name: round(value, 1) for name, value in seconds.items()},
        "peak_rss_mb": peak_rss_mb,
        "seed": seed,
        "versions": versions(repo),
    }


def gain(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Gain of oracle consistency and its standard error (of two independent means, not paired)."""
    before, after = summary["policy"]["before"], summary["policy"]["after"]
    return after["oracle_consistency"] - before["oracle_consistency"], math.hypot(before["stderr"], after["stderr"])


def table(summary: Mapping[str, Any]) -> str:
    """The small table at the end."""
    base, lora, rank = summary["judge"]["base"], summary["judge"]["lora"], summary["rank"]
    kinds = {name.split("_")[2]: name for name in lora["kinds"]}
    rows = [
        ("", "before", "after"),
        ("judge: accuracy on held-out pairs", f"{base['accuracy']:.3f}", f"{lora['accuracy']:.3f}"),
        *((f"  {kind}", *(f"{m['kinds'][name]['accuracy']:.3f}" for m in (base, lora))) for kind, name in kinds.items()),
        ("judge: AUC", f"{base['auc']:.3f}", f"{lora['auc']:.3f}"),
        ("ranking: tau-b of the color histogram, of the judge", f"{rank['histogram']['kendalltau']:.3f}", f"{rank['kendalltau']:.3f}"),
        (f"generator at {summary['test_resolution']} px (trained at {summary['train_resolution']} px)", "", ""),
    ]
    labels = {
        "oracle_consistency": "consistency, by the oracle", "reward": "consistency, by the judge (the reward)",
        "alignment": "panels show the named character", "view": "panels in the view asked for",
        "valid": "valid panels", "distinct": "panels differ in view",
    }  # fmt: skip
    for key, label in labels.items():
        cells = []
        for measured in (summary["policy"]["before"], summary["policy"]["after"]):
            error = f" ±{measured[STDERRS[key]]:.3f}" if key in STDERRS else ""
            cells.append(f"{measured[key]:.3f}{error}")
        rows.append((f"  {label}", *cells))
    return columns(rows)
