"""summary.json: what a quickstart showed, in numbers."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paco_toy.processes import QuickstartError

# summary key -> name of the evaluation's reward
MEASURES = {
    "oracle_consistency": "oracle_consistency",
    "reward": "consistency_score",
    "alignment": "oracle_alignment",
    "view": "oracle_view",
    "valid": "oracle_valid",
    "distinct": "oracle_distinct",
}
PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "llamafactory", "numpy")


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON-lines file; a line cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def policy_measures(run: Path) -> dict[str, dict[str, float]]:
    """`before` and `after`: the first and the last evaluation of a run, with `stderr` (of oracle_consistency) and `epoch`.

    Raises:
        QuickstartError: the run has no two evaluations, or one lacks a measure.
    """
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("phase") == "eval"]
    if len(rows) < 2:
        raise QuickstartError(f"{run}/metrics.jsonl has {len(rows)} evaluations; one before and one after training are needed")
    result = {}
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        missing = [name for name in MEASURES.values() if f"eval/{name}_mean" not in row]
        if missing:
            raise QuickstartError(f"the evaluation of epoch {row['epoch']} lacks {', '.join(missing)} (see {run})")
        result[when] = {key: row[f"eval/{name}_mean"] for key, name in MEASURES.items()}
        result[when]["stderr"] = row["eval/oracle_consistency_stderr"]
        result[when]["reward_stderr"] = row["eval/consistency_score_stderr"]
        result[when] |= {"epoch": row["epoch"], "num_images": row["eval/num_images"]}
    return result


def versions(repo: Path) -> dict[str, str]:
    """Versions of Python, the packages that matter, and the commit (with `+changes`)."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = importlib.metadata.version(name)
    git = ["git", "-C", str(repo)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout.strip()
        found["commit"] = commit + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # a tarball, no git
        found["commit"] = "unknown"
    return found


def build(results: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float], peak_rss_mb: int, seed: int, repo: Path) -> dict:
    """The whole summary from the stages' results."""
    judge, rl = results["judge"], results["rl"]
    return {
        "judge": {"base": dict(judge["base"]), "lora": dict(judge["lora"])},
        "rank": dict(results["rank"]),
        "policy": {when: dict(rl[when]) for when in ("before", "after")},
        "train_resolution": rl["train_resolution"],
        "test_resolution": rl["test_resolution"],
        "engine": results["server"]["engine"],
        "stage_seconds": {name: round(value, 1) for name, value in seconds.items()},
        "peak_rss_mb": peak_rss_mb,
        "seed": seed,
        "versions": versions(repo),
    }


def gain(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Gain of oracle consistency and its standard error (two independent means: no pairing is assumed)."""
    before, after = summary["policy"]["before"], summary["policy"]["after"]
    return after["oracle_consistency"] - before["oracle_consistency"], math.hypot(before["stderr"], after["stderr"])


def table(summary: Mapping[str, Any]) -> str:
    """The small table at the end."""
    base, lora = summary["judge"]["base"], summary["judge"]["lora"]
    before, after = summary["policy"]["before"], summary["policy"]["after"]
    test, train = summary["test_resolution"], summary["train_resolution"]
    rows = [
        ("", "before", "after"),
        ("judge: accuracy on held-out pairs", f"{base['accuracy']:.3f}", f"{lora['accuracy']:.3f}"),
        ("judge: AUC", f"{base['auc']:.3f}", f"{lora['auc']:.3f}"),
        (f"generator at {test} px (trained at {train} px)", "", ""),
    ]
    labels = {
        "oracle_consistency": "  consistency, by the oracle", "reward": "  consistency, by the judge (the reward)",
        "alignment": "  panels show the named character", "view": "  panels in the view asked for",
        "valid": "  valid panels", "distinct": "  panels differ in view",
    }  # fmt: skip
    for key, label in labels.items():
        errors = {"oracle_consistency": "stderr", "reward": "reward_stderr"}
        cells = [f"{m[key]:.3f}" + (f" ±{m[errors[key]]:.3f}" if key in errors else "") for m in (before, after)]
        rows.append((label, *cells))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{width}}  {row[1]:<13} {row[2]}".rstrip() for row in rows)
