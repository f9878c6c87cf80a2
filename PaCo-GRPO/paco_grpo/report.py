"""The report on a run: one page with images before and after, curves, and signs of trouble.

The page holds everything that it shows. The program is ``scripts/report.py``, which
``python -m paco_grpo.report RUN_DIR`` also starts.
"""

import base64
import io
import json
import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.monitoring.console import means
from paco_grpo.monitoring.trackers import MetricsFile
from paco_judge.images import data_url, load_image

PAGE = Path(__file__).with_name("report_page.html")  # a template of Jinja


class Name(NamedTuple):
    """How the page calls a metric, and what it says about it."""

    label: str
    meaning: str


# Other rewards are called by their own names.
REWARDS = {
    "consistency_score": Name(
        "judge: consistency",
        "The judge's probability that two panels of an image are consistent, mean over the pairs.",
    ),
    "between_images": Name(
        "judge: images differ",
        "1 − the judge's probability that panels of two images of one prompt are consistent. High "
        "while the images of a prompt differ; 1 for prompts that leave nothing open.",
    ),
    "consistency_for_editing": Name(
        "judge: edit",
        "The judge's probabilities that the instruction was followed and that the rest was kept: "
        "the root of their product.",
    ),
    "win_rate": Name(
        "judge: win rate",
        "The judge's probability that an image is better than others of its prompt.",
    ),
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
HEALTH = {
    "train/grad_norm": Name(
        "gradient norm", "Before clipping. A steady rise means that the learning rate is too high."
    ),
    "train/ratio_mean": Name(
        "mean ratio", "New to old probability of the samples. It should stay near 1."
    ),
    "train/clip_share": Name(
        "share of clipped samples", "These samples no longer change the weights."
    ),
    "advantage/zero_std_share": Name(
        "groups without spread", "All their images have the same score, so they teach nothing."
    ),
    "health/velocity_change": Name(
        "distance to the base model",
        "Relative change of the predicted velocity on fixed prompts. Above 0.75, the log warns.",
    ),
    "health/latent_std_vs_first": Name(
        "spread of latents",
        "Relative to the first epoch. Below 0.5 and above 2, the log warns of broken images.",
    ),
    "health/distinctness_vs_first": Name(
        "images of a prompt differ",
        "In their pixels, relative to the first epoch. Below 0.25, the log warns of a collapse.",
    ),
}
PHASES = {"sample": "sampling", "reward_wait": "rewards", "train": "training", "eval": "evaluation"}
OTHERS = 6  # pairs of images beside those that changed most
SIDE = 256  # pixels at most of a picture
TRAINING = "#e08a1e"  # colors of the curves, and of the legend in the template
EVALUATION = "#2563c9"
PLOT = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the browser's font
    "svg.hashsalt": "report",  # the same run gives the same page
}
Row = Mapping[str, Any]
Curves = dict[str, np.ndarray]  # metric → (N, 3): epoch, mean, its standard error or NaN


class Pair(NamedTuple):
    """Rows of eval_data.jsonl for one prompt and seed, in the first and in the last evaluation."""

    before: Row
    after: Row

    def scores(self, reward: str) -> tuple[float | None, float | None]:
        """Its scores before and after; None where one is missing."""
        return self.before["rewards"].get(reward), self.after["rewards"].get(reward)


@dataclass(frozen=True)
class RunReport:
    """A run directory ({save_dir}/{run_name}), read back."""

    config: Mapping[str, Any]  # as in config.yaml
    train: Curves  # rewards of the training samples
    test: Curves  # rewards of the evaluations
    health: Curves
    seconds: Mapping[str, float]  # phase → total
    pairs: Sequence[Pair]
    epochs: int

    def option(self, group: str, name: str) -> Any:
        """An option of config.yaml; None if it is unknown."""
        return self.config.get(group, {}).get(name)


# --- reading a run ------------------------------------------------------------------------------


def read_run(folder: Path) -> RunReport:
    """Read a run directory; a ``ValueError`` if it has no epoch and no evaluation yet."""
    metrics = MetricsFile(folder / "metrics.jsonl")
    rows = metrics.rows()
    train = metrics.rows("train")
    if not rows:
        raise ValueError(
            f"{metrics.path} has no epoch and no evaluation yet; let the run finish one first"
        )
    config_file = folder / "config.yaml"
    config = yaml.safe_load(config_file.read_bytes()) if config_file.is_file() else {}
    sample = config.get("sample", {})
    num_prompts = sample.get("unique_sample_num_per_epoch", 0)
    num_images = num_prompts * sample.get("num_images_per_prompt", 0)
    health = {name: _curve(train, name) for name in HEALTH}
    seconds = {}
    for key, phase in PHASES.items():
        total = sum(row.get(f"time/{key}_s") or 0 for row in rows)
        if total > 0:
            seconds[phase] = total
    return RunReport(
        config=config,
        train=_reward_curves(train, "reward/", "_std", math.sqrt(num_images) or math.nan),
        test=_reward_curves(metrics.rows("eval"), "eval/", "_stderr"),
        health={name: curve for name, curve in health.items() if len(curve)},
        seconds=seconds,
        pairs=_read_pairs(folder / "eval"),
        epochs=max(row["epoch"] for row in rows),
    )


def _curve(rows: Sequence[Row], name: str, error: str = "", divisor: float = 1.0) -> np.ndarray:
    """The metric ``name`` by epoch; its standard error is the metric ``error`` / ``divisor``."""
    points = []
    for row in rows:
        if row.get(name) is not None:
            points.append((row["epoch"], row[name], row.get(error)))
    curve = np.array(points, dtype=float).reshape(-1, 3)
    curve[:, 2] /= divisor
    return curve


def _reward_curves(rows: Sequence[Row], prefix: str, error: str, divisor: float = 1.0) -> Curves:
    curves = {}
    for row in rows:
        for name in means(row, prefix):
            curves[name] = _curve(rows, f"{prefix}{name}_mean", f"{prefix}{name}{error}", divisor)
    return {name: curve for name, curve in curves.items() if len(curve)}


def _read_pairs(evaluations: Path) -> list[Pair]:
    """The images that both the first and the last evaluation saved."""
    folders = sorted(evaluations.glob("epoch_*"))
    if len(folders) < 2:
        return []
    # Evaluations use the same items and seeds in the same order, so the file name identifies the
    # image.
    first = _saved_rows(folders[0])
    last = _saved_rows(folders[-1])
    pairs = []
    for name, before in first.items():
        after = last.get(name)
        if after is not None and after["prompt"] == before["prompt"]:
            pairs.append(Pair(before, after))
    return pairs


def _saved_rows(folder: Path) -> dict[str, Row]:
    """Rows of an evaluation whose images were saved, by file name, with whole paths."""
    rows = {}
    for row in read_rows(folder):
        if row["file"]:
            paths = {key: folder / row[key] for key in ("file", "reference") if row.get(key)}
            rows[row["file"]] = row | paths
    return rows


# --- writing the page ---------------------------------------------------------------------------


def write_report(
    run_dir: Path,
    out: Path,
    judge: Sequence[Path] = (),
    stage_seconds: Path | None = None,
    title: str | None = None,
) -> None:
    """Write the page ``out``.

    Args:
        judge: JSON files of ``paco-reward accuracy --output``, the base's first; the first and the
            last are compared.
        stage_seconds: JSON ``{stage: seconds}`` of a larger pipeline that the run was part of.
        title: Heading; None = the run's name.
    """
    run = read_run(run_dir)
    seconds = json.loads(stage_seconds.read_bytes()) if stage_seconds else run.seconds
    highlights, others = _gallery(run)
    changing = {name: curve for name, curve in run.health.items() if np.ptp(curve[:, 1]) > 0}
    constant = []
    for name, curve in run.health.items():
        if name not in changing:
            constant.append(f"{HEALTH[name].label} {curve[0, 1]:.3g}")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string(PAGE.read_text(encoding="utf-8"))
    with matplotlib.rc_context(PLOT):
        page = template.render(
            title=title or run_dir.resolve().name,
            settings=_settings(run, seconds),
            highlights=highlights,
            others=others,
            num_pairs=len(run.pairs),
            measures=_measures(run),
            colors={"training": TRAINING, "evaluation": EVALUATION},
            sides={part: run.option(part, "resolution") for part in ("train", "test")},
            curves=_reward_plots(run),
            judge=_judge_accuracy(judge),
            oracle=_judge_and_oracle(run),
            health=[_plot(HEALTH[name], [(curve, TRAINING)]) for name, curve in changing.items()],
            constant=", ".join(constant),
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")


def _settings(run: RunReport, seconds: Mapping[str, float]) -> str:
    """The run in one line: what was trained, and how many minutes it took."""
    epochs = f"{run.epochs} epoch" if run.epochs == 1 else f"{run.epochs} epochs"
    parts = [epochs]
    if run.config:
        prompts = run.option("sample", "unique_sample_num_per_epoch")
        images = run.option("sample", "num_images_per_prompt")
        side = run.option("train", "resolution")
        model = Path(str(run.option("pretrained", "model")))  # a name of the hub, or a folder
        parts = [
            "/".join(model.parts[-2:]),
            str(run.option("train", "loss_type")),
            f"{epochs} of {prompts} × {images} images at {side} px",
            f"evaluated at {run.option('test', 'resolution')} px",
            f"seed {run.config.get('seed')}",
        ]
    if seconds:
        total = sum(seconds.values()) / 60
        phases = ", ".join(f"{phase} {value / 60:.1f}" for phase, value in seconds.items())
        parts.append(f"{total:.1f} minutes ({phases})")
    return " · ".join(parts)


def _name(reward: str) -> Name:
    return REWARDS.get(reward, Name(reward.replace("_", " "), ""))


# --- what changed -------------------------------------------------------------------------------


def _gallery(run: RunReport) -> tuple[list[dict], list[dict]]:
    """Cards of the pairs with the largest gain and the largest loss, and of others."""
    rewards = [name for name in run.train if name in run.test]
    for name in run.test:
        if name.startswith("oracle_consistency") and name not in rewards:
            rewards.append(name)
    rewards = rewards[:3] or list(run.test)[:2]
    by_category = sorted(run.pairs, key=lambda pair: pair.before.get("category") or "")
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
            for heading, position in (("Largest gain", best), ("Largest loss", worst)):
                change = f"{heading}: {_name(rewards[0]).label} {changes[position]:+.2f}"
                highlights.append(_card(by_category[position], rewards, change))
            by_category = [p for i, p in enumerate(by_category) if i not in (best, worst)]
    # Chosen by category and place, never by score.
    count = min(OTHERS, len(by_category))
    places = np.linspace(0, len(by_category) - 1, count).round().astype(int)
    others = [_card(by_category[place], rewards) for place in places]
    return highlights, others


def _card(pair: Pair, rewards: Sequence[str], heading: str = "") -> dict[str, Any]:
    """The images of a pair with their scores; for an edit, with the reference image first."""
    files = {"before": pair.before["file"], "after": pair.after["file"]}
    if pair.before.get("reference"):
        files = {"reference": pair.before["reference"]} | files
    images = {}
    for caption, file in files.items():
        image = load_image(file)
        image.thumbnail((SIDE, SIDE))
        images[caption] = data_url(image)
    scores = {}
    for reward in rewards:
        texts = ["–" if score is None else f"{score:.2f}" for score in pair.scores(reward)]
        scores[_name(reward).label] = " → ".join(texts)
    return {
        "heading": heading,
        "category": pair.before.get("category") or "",
        "prompt": pair.before["prompt"],
        "images": images,
        "scores": scores,
    }


# --- by how much --------------------------------------------------------------------------------


def _measures(run: RunReport) -> list[list[str]]:
    """Every evaluated reward in the first and the last evaluation, with the change."""
    rows = []
    for reward, curve in run.test.items():
        row = [_name(reward).label]
        for _, value, error in curve[[0, -1]]:
            row.append(f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}")
        change = curve[-1, 1] - curve[0, 1]
        rows.append([*row, f"{change:+.3f}"])
    return rows


def _reward_plots(run: RunReport) -> list[dict]:
    """A plot for each reward, of training samples and evaluations; those that are trained first."""
    plots = []
    for reward in dict.fromkeys([*run.train, *run.test]):
        curves = []
        for part, color in ((run.train, TRAINING), (run.test, EVALUATION)):
            if reward in part:
                curves.append((part[reward], color))
        plots.append(_plot(_name(reward), curves))
    return plots


def _plot(name: Name, curves: Sequence[tuple[np.ndarray, str]]) -> dict[str, str]:
    """Curves in their colors, under the name of what they show."""
    figure = Figure(figsize=(3.4, 2.1))
    axes = figure.subplots()
    for curve, color in curves:
        epoch, value, error = curve.T
        axes.plot(epoch, value, color=color, marker="o", markersize=3)
        axes.fill_between(epoch, value - error, value + error, color=color, alpha=0.18, linewidth=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return name._asdict() | {"image": _svg(figure)}


def _svg(figure: Figure) -> str:
    """The figure as a URL that holds it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# --- can I trust it -----------------------------------------------------------------------------


def _judge_accuracy(files: Sequence[Path]) -> list[list[str]]:
    """Rows of a table: accuracy and AUC of the first and of the last judge."""
    if not files:
        return []
    if len(files) == 1:
        raise ValueError(f"{files[0]} alone compares nothing; give the base judge's file before it")
    first = json.loads(files[0].read_bytes())
    last = json.loads(files[-1].read_bytes())
    rows = []
    for name, label in (("accuracy", "accuracy"), ("auc", "AUC")):
        if name in first and name in last:
            rows.append([label, f"{first[name]:.3f}", f"{last[name]:.3f}"])
    return rows


def _judge_and_oracle(run: RunReport) -> dict[str, str] | None:
    """The reward of each image against the oracle's, in the first and the last evaluation."""
    oracles = [name for name in ("oracle_consistency", "oracle_edit") if name in run.test]
    rewards = [name for name in run.train if name in run.test and name not in oracles]
    if not oracles or not rewards:
        return None
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
    axes.set(xlabel=_name(oracles[0]).label, ylabel=_name(rewards[0]).label)
    axes.legend()
    return {
        "label": "The reward against the oracle",
        "meaning": "Each point is an image. Points in the upper left corner after training would "
        "mean that the generator exploits the reward.",
        "image": _svg(figure),
    }


if __name__ == "__main__":
    program = Path(__file__).resolve().parents[1] / "scripts" / "report.py"
    runpy.run_path(str(program), run_name="__main__")
