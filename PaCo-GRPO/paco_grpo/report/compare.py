"""Writes a page about several runs side by side, also of other rewards, prompt sets and lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_grpo.report.names import HEALTH, limits_of, reward_name
from paco_grpo.report.page import Page, card_of_plot, settings_line, template
from paco_grpo.report.plots import RUNS, Curve
from paco_grpo.report.run import RunReport
from paco_grpo.report.verdict import images_of, judge, means_by_epoch

_TRAINING_ONLY = ("advantage/zero_std_share", "train/ratio_mean", "train/clip_share")
# What an evaluation's numbers depend on, besides the weights.
_EVALUATED = ("dataset", "datasets", "test", "seed", "pretrained")
_PLACES = ("run_name", "save_dir", "resume_from", "num_processes")


def write_comparison(runs: Sequence[RunReport], out: Path, title: str = "") -> None:
    """Write the page ``out`` about ``runs``."""
    page = Page()
    cards = []
    measured: dict[str, dict[str, Any]] = {}  # reward → its curves and table
    health: dict[str, list[Curve]] = {}
    for number, run in enumerate(runs):
        label = f"{number + 1}. {run.name}"
        color = RUNS[number % len(RUNS)]
        card = {"label": label, "color": color, "verdict": judge(run, page.label)}
        cards.append(card | {"settings": settings_line(run)})
        best = run.best["epoch"] if run.best else None
        for reward, values in (run.overall | run.test).items():
            entry = measured.setdefault(reward, {"curves": [], "rows": []})
            entry["curves"].append(Curve(label, values, color, best))
            means = means_by_epoch(values)
            last = max(means)
            of_best = means.get(best) if best is not None else None
            first = means[min(means)]
            row = {"label": label, "color": color, "first": first, "best": of_best}
            row |= {"last": means[last], "epoch": last, "images": images_of(first, means[last])}
            entry["rows"].append(row)
        for metric, values in run.health.items():
            if metric not in _TRAINING_ONLY:
                health.setdefault(metric, []).append(Curve(label, values, color))
    rewards = []
    for reward, entry in measured.items():
        name = reward_name(reward, page.names)
        rewards.append(card_of_plot(name, entry["curves"], []) | {"rows_of_runs": entry["rows"]})
    text = template("compare.html").render(
        title=title or ", ".join(run.name for run in runs),
        cards=cards,
        rewards=rewards,
        health=[card_of_plot(HEALTH[name], health[name], limits_of(name)) for name in health],
        differences=_differences(runs),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def _differences(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Options that differ between the runs, with their values; first those of the evaluation."""
    options_of_runs = []
    names: dict[str, None] = {}  # in order
    for run in runs:
        options = _flat(run.config)
        options_of_runs.append(options)
        names |= dict.fromkeys(options)
    rows = []
    for name in names:
        values = [options.get(name, "–") for options in options_of_runs]
        if name not in _PLACES and values.count(values[0]) < len(values):
            is_evaluated = name.partition(".")[0] in _EVALUATED
            rows.append({"name": name, "values": values, "is_evaluated": is_evaluated})
    return sorted(rows, key=lambda row: not row["is_evaluated"])


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their dotted names."""
    flat = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
