"""The report on a quickstart: PaCo-GRPO's, with what only the toy world knows.

`python -m paco_toy.report OUT RUN TITLE` writes OUT/report.html from RUN, the training's folder in
OUT, and OUT/summary.json.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from paco_grpo.report.names import Name, reward_name
from paco_grpo.report.page import Page, write_report
from paco_grpo.report.plots import EVALUATION, STYLE, svg_url
from paco_grpo.report.run import RunReport, read_run
from paco_judge.files import read_json

NAMES = {
    "oracle_consistency": Name(
        "oracle: consistency",
        "The share of pairs of panels that show the same character, read from the pixels.",
    ),
    "oracle_between_images": Name(
        "oracle: images differ",
        "1 − the share of pairs of panels from two images of one prompt that show the same "
        "character.",
    ),
    "oracle_alignment": Name(
        "oracle: prompt followed",
        "The share of panels that show what the prompt names, read from the pixels.",
    ),
    "oracle_distinct": Name(
        "oracle: views differ",
        "The share of pairs of panels with different views, read from the pixels.",
    ),
    "oracle_edit": Name(
        "oracle: edit", "The reward: how well the instruction was followed and the rest was kept."
    ),
    "oracle_followed": Name(
        "oracle: instruction followed", "Whether the edited attribute is as asked."
    ),
    "oracle_kept": Name("oracle: the rest is kept", "Whether the other attributes are unchanged."),
}
ORACLE = "The oracle is a program that reads images from their pixels. It is never trained."
JUDGE = (
    "The judge is the small vision-language model that the quickstart fine-tuned; its answers are "
    "the reward."
)


def judge_accuracy(judges: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The card of the judge before and after its training."""
    rows = []
    for name, label in (("accuracy", "accuracy"), ("auc", "AUC")):
        values = [judges[judge][name] for judge in ("base", "lora")]
        rows.append([label, *("–" if value is None else f"{value:.3f}" for value in values)])
    return {
        "label": "The judge",
        "meaning": "On held-out pairs: images that it was not trained on. A guess has 0.5. "
        "–: no answer began with Yes or No.",
        "head": ["", "before its training", "after"],
        "rows": rows,
    }


def judge_and_oracle(run: RunReport) -> dict[str, str] | None:
    """The reward of each image against the oracle's, in the first and the last evaluation."""
    oracles = [name for name in ("oracle_consistency", "oracle_edit") if name in run.test]
    rewards = [name for name in run.train if name in run.test and name not in oracles]
    if not oracles or not rewards:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 3))
        axes = figure.subplots()
        points: dict[str, list] = {"before": [], "after": []}
        for pair in run.pairs:
            for when, row in pair._asdict().items():
                point = [row["rewards"].get(oracles[0]), row["rewards"].get(rewards[0])]
                if None not in point:
                    points[when].append(point)
        for (when, values), color in zip(points.items(), ("#8a94a0", EVALUATION), strict=True):
            label = f"{when} ({len(values)} images)"
            axes.scatter(*np.reshape(values, (-1, 2)).T, s=14, alpha=0.6, color=color, label=label)
        oracle = reward_name(oracles[0], NAMES).label
        reward = reward_name(rewards[0], NAMES).label
        axes.set(xlabel=oracle, ylabel=reward)
        axes.legend()
        texts = []
        for when, values in points.items():
            means = np.reshape(values, (-1, 2)).mean(axis=0)
            texts.append(
                f"{when}: mean {oracle} {means[0]:.2f}, {reward} {means[1]:.2f} "
                f"({len(values)} images)"
            )
        return {
            "label": "The reward against the oracle",
            "meaning": "Each point is an image. Points in the upper left corner after training "
            "would mean that the generator exploits the reward.",
            "image": svg_url(figure),
            "alt": "; ".join(texts),
        }


def main() -> None:
    """Write the report of a quickstart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of a quickstart")
    parser.add_argument("run", help="the training's folder in it")
    parser.add_argument("title", help="heading of the page")
    arguments = parser.parse_args()
    out = arguments.out
    summary = read_json(out / "summary.json")
    run = read_run(out / arguments.run)
    evidence = []
    introduction = ORACLE
    if "judge" in summary:
        introduction = f"{JUDGE} {ORACLE}"
        evidence.append(judge_accuracy(summary["judge"]))
    scatter = judge_and_oracle(run)
    if scatter:
        evidence.append(scatter)
    page = Page(arguments.title, introduction, NAMES, evidence, summary["stage_seconds"])
    write_report(run, out / "report.html", page)


if __name__ == "__main__":
    main()
