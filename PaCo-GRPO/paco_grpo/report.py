"""Write one self-contained page about a run: images before and after, curves, signs of trouble.

``python -m paco_grpo.report RUN_DIR``, or ``scripts/report.py``.
"""

import base64
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paco_grpo.monitoring.metrics import means
from paco_judge.arguments import Parser
from paco_judge.errors import UserError, run_command
from paco_judge.files import read_json_lines
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
}
HEALTH = {
    "reward/within_minus_between": Name(
        "w − b",
        "How much more panels of one image agree than panels of different images of an open "
        "prompt, by the judge. It rises with consistency and falls when all images become the "
        "same.",
    ),
    "health/diversity_vs_first": Name(
        "diversity",
        "1 − b, how much images of an open prompt differ for the judge, relative to the first "
        "epochs. Below 0.7, the log warns.",
    ),
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
        """Its scores before and after; None where one is missing, or is of another prompt set."""
        name_of_set, _, name = reward.rpartition("/")
        if name_of_set and name_of_set != self.before["dataset"]:
            return None, None
        return self.before["rewards"].get(name), self.after["rewards"].get(name)

    @property
    def heading(self) -> str:
        """Its prompt set, where a run has several, and its category."""
        parts = (self.before.get("dataset"), self.before.get("category"))
        return " · ".join(filter(None, parts))


@dataclass(frozen=True)
class RunReport:
    """A run directory ({save_dir}/{run_name}), read back."""

    name: str
    config: Mapping[str, Any]  # as in config.yaml
    train: Curves  # rewards of the training samples; SET/REWARD with several prompt sets
    test: Curves  # rewards of the evaluations
    health: Curves
    seconds: Mapping[str, float]  # phase → total
    pairs: Sequence[Pair]
    epochs: int
    best: Row | None  # the best evaluation; None: none has a trained reward


# --- reading a run ------------------------------------------------------------------------------


def read_run(folder: Path) -> RunReport:
    """Read a run directory.

    Raises:
        UserError: It has no epoch and no evaluation yet.
    """
    file = folder / "metrics.jsonl"
    whole_lines, _, _ = file.read_bytes().rpartition(b"\n")  # the run may be writing one
    rows = list(map(json.loads, whole_lines.splitlines()))
    if not rows:
        raise UserError(f"{file} has no epoch and no evaluation yet; let the run finish one first")
    train = [row for row in rows if row["phase"] == "train"]
    test = [row for row in rows if row["phase"] == "eval"]
    config = yaml.safe_load((folder / "config.yaml").read_bytes())
    sample = config["sample"]
    num_images = sample["unique_sample_num_per_epoch"] * sample["num_images_per_prompt"]
    health = {}
    for name in HEALTH:
        curve = _curve(train, name)
        if len(curve):
            health[name] = curve
    seconds = {}
    for key, phase in PHASES.items():
        total = sum(row.get(f"time/{key}_s") or 0 for row in rows)
        if total > 0:
            seconds[phase] = total
    train_curves = _reward_curves(train, "reward/", "_std", math.sqrt(num_images))
    test_curves = _reward_curves(test, "eval/", "_stderr")
    if config["datasets"]:
        train_curves = _reward_curves(train, "set/", "_stderr")
        test_curves = _reward_curves(test, "set/", "_stderr")
    return RunReport(
        name=folder.resolve().name,
        config=config,
        train=train_curves,
        test=test_curves,
        health=health,
        seconds=seconds,
        pairs=_read_pairs(folder / "eval"),
        epochs=max(row["epoch"] for row in rows),
        best=_best(test),
    )


def _best(evaluations: Sequence[Row]) -> Row | None:
    """The evaluation that the run calls the best (``training.best``)."""
    if not evaluations:
        return None
    epoch = evaluations[-1].get("eval/best_epoch")
    return next((row for row in evaluations if row["epoch"] == epoch), None)


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
    return curves


def _read_pairs(evaluations: Path) -> list[Pair]:
    """The images that both the first and the last evaluation saved."""
    # Written when all images are there; epoch_0010_keep is the user's own.
    files = evaluations.glob("epoch_*[0-9]/eval_data.jsonl")
    files = sorted(files, key=lambda file: (len(file.parent.name), file))
    if len(files) < 2:
        return []
    first = _saved_rows(files[0])
    last = _saved_rows(files[-1])
    return [Pair(before, last[key]) for key, before in first.items() if key in last]


def _saved_rows(file: Path) -> dict[tuple[str, int], Row]:
    """Rows of an evaluation whose images were saved, by prompt and seed, with whole paths.

    Not by file name: a run may be resumed with other test options.
    """
    rows = {}
    for row in read_json_lines(file):
        if row["file"]:
            paths = {key: file.parent / row[key] for key in ("file", "reference") if row.get(key)}
            rows[row["prompt"], row["seed"]] = row | paths
    return rows


# --- writing the page ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """What a page shows besides the run itself.

    Attributes:
        title: The heading; "" = the run's name.
        introduction: Sentences after the one that says what is trained.
        names: Of further rewards.
        evidence: Cards of "Can I trust it": ``label``, ``meaning``, and an ``image`` (a URL) or a
            table (``head``, ``rows``).
        seconds: Of stages of a larger pipeline, in place of the run's phases.
    """

    title: str = ""
    introduction: str = ""
    names: Mapping[str, Name] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()
    seconds: Mapping[str, float] | None = None

    def name(self, reward: str) -> Name:
        """Of any reward, which may follow the name of its prompt set: ``SET/REWARD``."""
        name_of_set, _, name = reward.rpartition("/")
        known = (REWARDS | dict(self.names)).get(name, Name(name.replace("_", " "), ""))
        return known._replace(label=f"{known.label} · {name_of_set}") if name_of_set else known


def write_report(run: RunReport, out: Path, page: Page = Page()) -> None:
    """Write the page ``out`` about ``run``."""
    highlights, others = _gallery(run, page)
    template = jinja2.Template(
        PAGE.read_text(encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    with matplotlib.rc_context(PLOT):
        text = template.render(
            title=page.title or run.name,
            introduction=f"{_purpose(run, page)} {page.introduction}".strip(),
            settings=_settings(run, page.seconds or run.seconds),
            highlights=highlights,
            others=others,
            num_pairs=len(run.pairs),
            measures=_measures(run, page),
            colors={"training": TRAINING, "evaluation": EVALUATION},
            curves=_reward_plots(run, page),
            evidence=page.evidence,
            health=[_plot(HEALTH[name], [(run.health[name], TRAINING)]) for name in run.health],
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def _purpose(run: RunReport, page: Page) -> str:
    """What is trained, and what is wanted."""
    train = run.config["train"]
    sets = run.config["datasets"] or {"": train}
    wanted = []
    for set_name, set_options in sets.items():
        for name, weight in (set_options["reward_fn"] or train["reward_fn"]).items():
            if weight:
                short = name.rpartition(":")[2]
                label = page.name(f"{set_name}/{short}" if set_name else short).label
                wanted.append(label if weight == 1 else f"{label} (weight {weight:g})")
    model = Path(run.config["pretrained"]["model"])  # a name of the hub, or a folder
    return (
        f"Reinforcement learning ({train['loss_type']}) changes the image generator "
        f"{'/'.join(model.parts[-2:])} so that its images score higher in: {', '.join(wanted)}."
    )


def _settings(run: RunReport, seconds: Mapping[str, float]) -> str:
    """The run in one line: its size, whether it ended early, and how many minutes it took."""
    config = run.config
    sample = config["sample"]
    planned = config["num_epochs"]
    stopped = "stopped after " if run.epochs < planned else ""
    images = f"{sample['unique_sample_num_per_epoch']} × {sample['num_images_per_prompt']} images"
    parts = [
        f"{stopped}{run.epochs} of {planned} epochs",
        f"{images} at {config['train']['resolution']} px an epoch",
        f"evaluated at {config['test']['resolution']} px",
        f"seed {config['seed']}",
    ]
    if run.best:
        reward = run.best["eval/trained_reward"]
        parts.append(
            f"best evaluation after epoch {run.best['epoch']}: trained reward {reward:.3f}"
        )
    if seconds:
        total = sum(seconds.values()) / 60
        phases = ", ".join(f"{phase} {value / 60:.1f}" for phase, value in seconds.items())
        parts.append(f"{total:.1f} minutes ({phases})")
    return " · ".join(parts)


# --- what changed -------------------------------------------------------------------------------


def _gallery(run: RunReport, page: Page) -> tuple[list[dict], list[dict]]:
    """Cards of the pairs with the largest gain and the largest loss, and of others."""
    trained = [name for name in run.train if name in run.test]
    rewards = list(dict.fromkeys([*trained, *run.test]))
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
            for heading, position in (("Largest gain", best), ("Largest loss", worst)):
                change = f"{heading}: {page.name(rewards[0]).label} {changes[position]:+.2f}"
                highlights.append(_card(by_category[position], rewards, page, change))
            by_category = [p for i, p in enumerate(by_category) if i not in (best, worst)]
    # Chosen by category and place, never by score.
    count = min(OTHERS, len(by_category))
    places = np.linspace(0, len(by_category) - 1, count).round().astype(int)
    others = [_card(by_category[place], rewards, page) for place in places]
    return highlights, others


def _card(pair: Pair, rewards: Sequence[str], page: Page, heading: str = "") -> dict[str, Any]:
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
    of_pair = []
    for reward in rewards:
        name_of_set = reward.rpartition("/")[0]
        if name_of_set in ("", pair.before.get("dataset")):
            of_pair.append(reward)
    for reward in of_pair[:3]:
        texts = ["–" if score is None else f"{score:.2f}" for score in pair.scores(reward)]
        scores[page.name(reward).label] = " → ".join(texts)
    return {
        "heading": heading,
        "category": pair.heading,
        "prompt": pair.before["prompt"],
        "images": images,
        "scores": scores,
    }


# --- by how much --------------------------------------------------------------------------------


def _measures(run: RunReport, page: Page) -> list[list[str]]:
    """Every evaluated reward in the first and the last evaluation, with the change."""
    rows = []
    for reward, curve in run.test.items():
        row = [page.name(reward).label]
        for _, value, error in curve[[0, -1]]:
            row.append(f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}")
        change = curve[-1, 1] - curve[0, 1]
        rows.append([*row, f"{change:+.3f}"])
    return rows


def _reward_plots(run: RunReport, page: Page) -> list[dict]:
    """A plot for each reward, of training samples and evaluations; those that are trained first."""
    plots = []
    for reward in dict.fromkeys([*run.train, *run.test]):
        curves = []
        for part, color in ((run.train, TRAINING), (run.test, EVALUATION)):
            if reward in part:
                curves.append((part[reward], color))
        plots.append(_plot(page.name(reward), curves))
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
    return name._asdict() | {"image": svg_url(figure)}


def svg_url(figure: Figure) -> str:
    """The figure as a URL that holds it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# --- command line -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if there is nothing to report on."""
    parser = Parser(prog="report.py", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, help="{save_dir}/{run_name} of a training run")
    parser.add_argument("--title", default="", help="heading of the page (default: the run's name)")
    parser.add_argument("--out", type=Path, help="the page (default RUN_DIR/report.html)")
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / "report.html"

    def run() -> None:
        write_report(read_run(options.run_dir), out, Page(options.title))
        print(out)

    return run_command(run, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
