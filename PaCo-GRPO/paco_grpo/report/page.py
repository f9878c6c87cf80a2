"""Writes the page about a run: a verdict, images before and after, curves, signs of trouble."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from paco_grpo.monitoring.signs import DIVERGENCE
from paco_grpo.report.names import HEALTH, Name, limits_of, reward_name
from paco_grpo.report.plots import EVALUATION, LIMIT, TRAINING, Curve, plot
from paco_grpo.report.run import Pair, RunReport
from paco_grpo.report.verdict import (
    after,
    changes_of,
    evaluated_epochs,
    images_of,
    is_evaluated_twice,
    judge,
    means_by_epoch,
)
from paco_judge.images import data_url, load_image

OTHERS = 6  # pairs of images beside those that changed most
SIDE = 256  # pixels at most of a picture
SHORT = 80  # letters of a prompt in an alternative text


@dataclass(frozen=True)
class Page:
    """What a page shows besides the run itself.

    Attributes:
        title: The heading; "" = the run's name.
        introduction: Sentences after the one that says what is trained.
        names: Of further rewards.
        evidence: Cards of "Can I trust it": ``label``, ``meaning``, and an ``image`` (a URL) with
            its ``alt``, or a table (``head``, ``rows``).
        seconds: Of stages of a larger pipeline, in place of the run's phases.
    """

    title: str = ""
    introduction: str = ""
    names: Mapping[str, Name] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()
    seconds: Mapping[str, float] | None = None

    def label(self, reward: str) -> str:
        """How the page calls a reward."""
        return reward_name(reward, self.names).label


def write_report(run: RunReport, out: Path, page: Page = Page()) -> None:
    """Write the page ``out`` about ``run``."""
    highlights, others = _gallery(run, page)
    text = template("page.html").render(
        title=page.title or run.name,
        verdict=judge(run, page.label),
        introduction=f"{_purpose(run, page)} {page.introduction}".strip(),
        settings=settings_line(run, page.seconds),
        highlights=highlights,
        others=others,
        num_pairs=len(run.pairs),
        measures=_measures(run, page),
        colors={"training": TRAINING, "evaluation": EVALUATION, "limit": LIMIT},
        curves=_reward_plots(run, page),
        evidence=page.evidence,
        health=_health_plots(run),
        warnings=run.warnings,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def template(name: str) -> jinja2.Template:
    """A page's template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def _purpose(run: RunReport, page: Page) -> str:
    """What is trained, and what is wanted."""
    train = run.config["train"]
    wanted = []
    for reward, weight in run.weights.items():
        label = page.label(reward)
        wanted.append(label if weight == 1 else f"{label} (weight {weight:g})")
    model = Path(run.config["pretrained"]["model"])  # a name of the hub, or a folder
    return (
        f"Reinforcement learning ({train['loss_type']}) changes the image generator "
        f"{'/'.join(model.parts[-2:])} so that its images score higher in: {', '.join(wanted)}."
    )


def settings_line(run: RunReport, seconds: Mapping[str, float] | None = None) -> str:
    """The run in one line: its size, and how many minutes it took."""
    config = run.config
    sample = config["sample"]
    images = f"{sample['unique_sample_num_per_epoch']} × {sample['num_images_per_prompt']} images"
    parts = [
        f"{run.epochs} of {config['num_epochs']} epochs",
        f"{images} at {config['train']['resolution']} px an epoch",
        f"learning rate {config['train']['learning_rate']:g}",
        f"evaluated at {config['test']['resolution']} px",
        f"seed {config['seed']}",
    ]
    seconds = seconds or run.seconds
    if seconds:
        total = sum(seconds.values()) / 60
        phases = ", ".join(f"{phase} {value / 60:.1f}" for phase, value in seconds.items())
        parts.append(f"{total:.1f} minutes ({phases})")
    return " · ".join(parts)


# --- what changed -------------------------------------------------------------------------------


def _gallery(run: RunReport, page: Page) -> tuple[list[dict], list[dict]]:
    """Cards of the pairs that changed most and least by the first trained reward, and of others."""
    rewards = [change.reward for change in changes_of(run, page.label)]
    by_category = sorted(run.pairs, key=lambda pair: pair.heading)
    highlights = []
    changes = {}  # position → change of the first reward
    for position, pair in enumerate(by_category):
        before, after = pair.scores(rewards[0]) if rewards else (None, None)
        if before is not None and after is not None:
            changes[position] = after - before
    if changes:
        best = max(changes, key=changes.get)
        worst = min(changes, key=changes.get)
        if changes[best] > changes[worst]:
            # Not "gain" and "loss": a weight may be negative, and all may fall.
            headings = {
                best: "Rose most" if changes[best] >= 0 else "Fell least",
                worst: "Fell most" if changes[worst] <= 0 else "Rose least",
            }
            for position, heading in headings.items():
                change = f"{heading}: {page.label(rewards[0])} {changes[position]:+.2f}"
                highlights.append(_card(by_category[position], rewards, page, change))
            for position in sorted((best, worst), reverse=True):
                del by_category[position]
    # Chosen by category and place, never by score.
    count = min(OTHERS, len(by_category))
    places = np.linspace(0, len(by_category) - 1, count).round().astype(int)
    others = []
    for place in places:
        others.append(_card(by_category[place], rewards, page))
    return highlights, others


def _card(pair: Pair, rewards: Sequence[str], page: Page, heading: str = "") -> dict[str, Any]:
    """The images of a pair with their scores; for an edit, with the reference image first."""
    of_pair = []
    for reward in rewards:
        if reward.rpartition("/")[0] in ("", pair.before.get("dataset")):
            of_pair.append(reward)
    scores = {}
    results = {"before": [], "after": [], "reference": []}
    for reward in of_pair[:3]:
        label = page.label(reward)
        texts = ["–" if score is None else f"{score:.2f}" for score in pair.scores(reward)]
        scores[label] = " → ".join(texts)
        results["before"].append(f"{label} {texts[0]}")
        results["after"].append(f"{label} {texts[1]}")
    files = {"before": pair.before["file"], "after": pair.after["file"]}
    if pair.before.get("reference"):
        files = {"reference": pair.before["reference"]} | files
    images = []
    for caption, file in files.items():
        image = load_image(file)
        image.thumbnail((SIDE, SIDE))
        alt = ", ".join([caption, *results[caption]])
        alt = f"{alt}: {pair.before['prompt'][:SHORT]}"
        images.append({"caption": caption, "image": data_url(image), "alt": alt})
    return {
        "heading": heading,
        "category": pair.heading,
        "prompt": pair.before["prompt"],
        "images": images,
        "scores": scores,
    }


# --- by how much --------------------------------------------------------------------------------


def _measures(run: RunReport, page: Page) -> dict[str, Any]:
    """The table of every reward in the first, the best and the last evaluation."""
    epochs = evaluated_epochs(run)
    if not epochs:
        return {}
    shown = sorted({epochs[0], epochs[-1]} | ({run.best["epoch"]} if run.best else set()))
    changes = {}
    if is_evaluated_twice(run):
        for change in changes_of(run, page.label):
            changes[change.reward] = change
    rows = []
    for reward, curve in run.test.items():
        means = means_by_epoch(curve)
        rows.append(
            {
                "label": page.label(reward),
                "is_trained": reward in run.weights,
                "means": [means.get(epoch) for epoch in shown],
                "change": changes.get(reward),
                "images": images_of(means[min(means)], means[max(means)]),
            }
        )
    rows.sort(key=lambda row: not row["is_trained"])
    best = run.best["epoch"] if run.best else None
    head = []
    for epoch in shown:
        head.append(f"{after(epoch)} (best)" if epoch == best else after(epoch))
    return {"head": head, "rows": rows, "has_change": bool(changes)}


def _reward_plots(run: RunReport, page: Page) -> list[dict[str, Any]]:
    """A plot for each reward, of training samples and evaluations; those that are trained first."""
    best = run.best["epoch"] if run.best else None
    rewards = dict.fromkeys([*run.weights, *run.train, *run.test])
    plots = []
    for reward in rewards:
        curves = []
        if reward in run.train:
            curves.append(Curve("training samples", run.train[reward], TRAINING))
        if reward in run.test:
            curves.append(Curve("evaluation", run.test[reward], EVALUATION, best))
        if curves:
            limits = [] if reward in run.weights else _guard_limits(run, reward)
            name = reward_name(reward, page.names)
            plots.append(card_of_plot(name, curves, limits))
    return plots


def _guard_limits(run: RunReport, reward: str) -> list[float]:
    """Below it, the last evaluation would have warned: three errors of its difference."""
    curve = run.test.get(reward, np.empty((0, 4)))
    if len(curve) < 2:
        return []
    limit = curve[0, 1] - DIVERGENCE * math.hypot(curve[0, 2], curve[-1, 2])
    return [limit] if math.isfinite(limit) else []


def _health_plots(run: RunReport) -> list[dict[str, Any]]:
    plots = []
    for metric, values in run.health.items():
        curves = [Curve("training", values, TRAINING)]
        plots.append(card_of_plot(HEALTH[metric], curves, limits_of(metric)))
    return plots


def card_of_plot(name: Name, curves: Sequence[Curve], limits: Sequence[float]) -> dict[str, Any]:
    """A plot under the name of what it shows."""
    card = name._asdict() | plot(curves, limits)
    return card | {"alt": f"{name.label}: {card['alt']}"}
