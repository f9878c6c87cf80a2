"""The quickstart over seeds, and the README's results from it. Run by hand.

    .venv/bin/python quickstart/seeds.py 0 1 2     # quickstart/run.sh for each seed without results; 11 minutes each
    .venv/bin/python quickstart/seeds.py           # tables, pictures and README again, from the results that there are

quickstart/seeds.json has the summary.json of each seed and config.health's warnings, seeds.md a table. Settings were chosen
on seeds 0 to 9; seeds from 10 on were run once. A run that was interrupted continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paco_toy.hacks import health_of
from paco_toy.stages import CONFIG
from paco_toy.summary import MEASURES
from study import DRAWN, mean_change

HERE = Path(__file__).resolve().parent
RESULTS, OUT = HERE / "seeds.json", HERE / "out"
FIRST_REPORTED = 10  # settings were chosen on the seeds below
SHOWN = 0  # the seed of the README's pictures
STUDIES = {"rewards": "What each reward does", "objectives": "What each objective does with one reward"}
JUDGED = ("judge's accuracy", "that of its weakest kind", "τ-b")
SIDES = ("alignment", "view", "valid", "distinct")


def run(seed: int) -> dict[str, Any]:
    """The summary of one quickstart, of all its epochs on any machine; seed SHOWN also gives the pictures."""
    subprocess.run(["bash", str(HERE / "run.sh"), "--seed", str(seed), "--minutes", "60"], check=True)
    if seed == SHOWN:
        for name in ("before_after", "curves"):
            shutil.copy(OUT / f"report_{name}.png", HERE.parent / "assets" / f"quickstart_{name}.png")
    return json.loads((OUT / "summary.json").read_text()) | health_of(OUT / "runs" / CONFIG)


def _change(summary: Mapping[str, Any], name: str) -> str:
    policy = summary["policy"]
    change = policy["change"][name]
    return f"{policy['before'][name]:.2f} → {policy['after'][name]:.2f} ({change['mean']:+.2f} ± {change['stderr']:.2f})"


def table(summaries: Mapping[int, Mapping[str, Any]]) -> str:
    """Markdown: a row for each seed."""
    head = ("seed", *JUDGED, *(MEASURES[name] for name in DRAWN), *SIDES, "warnings (epoch)")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for seed, summary in sorted(summaries.items()):
        change = summary["policy"]["change"]
        cells = [str(seed), *(f"{value:.3f}" for value in judged(summary))]
        cells += [_change(summary, name) for name in DRAWN]
        cells += [f"{change[name]['mean']:+.3f} ± {change[name]['stderr']:.3f}" for name in SIDES]
        cells.append(", ".join(f"{sign} ({epoch})" for sign, epoch in summary["warnings"].items()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def judged(summary: Mapping[str, Any]) -> tuple[float, ...]:
    """JUDGED of a seed."""
    judge = summary["judge"]["lora"]
    return judge["accuracy"], min(kind["accuracy"] for kind in judge["kinds"].values()), summary["rank"]["kendalltau"]


def spread(summaries: Mapping[int, Mapping[str, Any]]) -> str:
    """Markdown: mean, lowest and highest of the seeds that settings were chosen on, and of the others."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for words, is_own in (("settings chosen on", lambda n: n < FIRST_REPORTED), ("run once:", lambda n: n >= FIRST_REPORTED)):
        if own := [seed for seed in sorted(summaries) if is_own(seed)]:
            groups[f"{words} {', '.join(map(str, own))}"] = [summaries[seed] for seed in own]
    lines = [f"| | {' | '.join(groups)} |", "|---" * (1 + len(groups)) + "|"]

    def row(words: str, form: str, value: Callable[[Mapping[str, Any]], float]) -> None:
        found = [[value(summary) for summary in own] for own in groups.values()]
        cells = (f"{np.mean(v):{form}} ({min(v):{form}} to {max(v):{form}})" for v in found)
        lines.append(f"| {words} | {' | '.join(cells)} |")

    for number, words in enumerate(JUDGED):
        row(words, ".3f", lambda summary, number=number: judged(summary)[number])
    for name in (*DRAWN, *SIDES):
        row(f"change: {MEASURES[name]}", "+.3f", lambda summary, name=name: summary["policy"]["change"][name]["mean"])
    return "\n".join(lines) + "\n"


def aims(own: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: how many of these seeds meet each aim."""

    def kept(change: Mapping[str, Mapping[str, float]]) -> bool:
        return all(change[name]["mean"] >= -0.05 - 2 * change[name]["stderr"] for name in ("view", "valid", "distinct"))

    changes = [summary["policy"]["change"] for summary in own]
    met = {
        "the judge's accuracy is at least 0.97": [judged(summary)[0] >= 0.97 for summary in own],
        "and 0.95 for each kind of pair": [judged(summary)[1] >= 0.95 for summary in own],
        "consistency of full prompts rises by 0.15": [change["consistency"]["mean"] >= 0.15 for change in changes],
        "view, valid and distinct panels fall by no more than 0.05 and two standard errors": [kept(change) for change in changes],
        "config.health does not warn": [not summary["warnings"] for summary in own],
    }
    counts = ", ".join(f"{words} in {sum(each)}" for words, each in met.items())
    return f"Of the {len(own)} seeds that were run once, {counts}."


def quickstart_table(summary: Mapping[str, Any]) -> str:
    """Markdown: one quickstart, before and after."""
    base, lora, rank, policy = summary["judge"]["base"], summary["judge"]["lora"], summary["rank"], summary["policy"]
    each = [" / ".join(f"{kind['accuracy']:.2f}" for kind in judge["kinds"].values()) for judge in (base, lora)]
    rows = [
        (f"judge: accuracy on {lora['n']} pairs of held-out characters", f"{base['accuracy']:.3f}", f"**{lora['accuracy']:.3f}**", ""),
        ("with a theme that names all, names a part, no theme, with broken panels", *each, ""),
        ("judge: AUC", f"{base['auc']:.3f}", f"**{lora['auc']:.3f}**", ""),
        (f"judge: rankings, τ-b (color histograms: {rank['histogram']['kendalltau']:.3f})", "", f"**{rank['kendalltau']:.3f}**", ""),
    ]
    for name, change in policy["change"].items():
        values = (f"{policy[when][name]:.3f}" for when in ("before", "after"))
        rows.append((f"generator: {MEASURES[name]}", *values, f"{change['mean']:+.3f} ± {change['stderr']:.3f}"))
    return "\n".join(["| | before | after | change |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def study_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the mean change of each kind of run of study.py."""
    names = (*DRAWN, *SIDES)
    lines = [f"| | seeds, epochs | {' | '.join(MEASURES[name] for name in names)} |", "|---" * (len(names) + 2) + "|"]
    for kind in dict.fromkeys(result["kind"] for result in found):
        own = [result for result in found if result["kind"] == kind]
        lines.append(f"| {kind} | {len(own)}, {own[0]['epochs']} | {' | '.join(mean_change(own, name) for name in names)} |")
    return "\n".join(lines)


def results(summaries: Mapping[int, Mapping[str, Any]]) -> str:
    """The README's text between the markers."""
    summary = summaries[SHOWN]
    minutes, policy = sum(summary["stage_seconds"].values()) / 60, summary["policy"]
    parts = [
        (f"`bash quickstart/run.sh`, seed {SHOWN}: {minutes:.0f} minutes on two cores after the installation, "
        f"{summary['peak_rss_mb'] / 1024:.1f} GB. {policy['num_images']} test images at {summary['test_resolution']} px after "
        f"{policy['epochs']} epochs at {summary['train_resolution']} px; errors of changes are paired:"),
        quickstart_table(summary),
        "![The same prompts and noise before and after](assets/quickstart_before_after.png)",
        "![Curves of that run](assets/quickstart_curves.png)",
    ]
    if len(summaries) > 1:
        parts += ["Over seeds, mean (lowest to highest; [each seed](quickstart/seeds.md)):", spread(summaries).strip()]
        if once := [summary for seed, summary in summaries.items() if seed >= FIRST_REPORTED]:
            parts.append(aims(once))
    for name, words in STUDIES.items():
        file = HERE / f"study_{name}.json"
        if file.is_file():
            parts += [
                f"{words} (`python quickstart/study.py {name}`, [each run](quickstart/study_{name}.md)), mean change over seeds:",
                study_table(json.loads(file.read_text())),
                f"![Agreement, choice and consistency by epoch](assets/study_{name}.png)",
            ]
    return "\n\n".join(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for seed in parser.parse_args().seeds:
        if str(seed) not in found:
            found[str(seed)] = run(seed)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    summaries = {int(seed): summary for seed, summary in found.items()}
    if SHOWN not in summaries:
        raise SystemExit(f"seed {SHOWN} has no results; it is the README's: quickstart/seeds.py {SHOWN}")
    print(results(summaries))
    RESULTS.with_suffix(".md").write_text(table(summaries))
    print(table(summaries))


if __name__ == "__main__":
    main()
