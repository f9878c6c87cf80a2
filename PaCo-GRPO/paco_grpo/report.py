"""``python -m paco_grpo.report RUN_DIR [--judge JSON …] [--out report.html]``: one self-contained page about a run.

It shows what changed, by how much, whether to trust it, and how long it took. The figures also become PNG files next to it.
"""

import argparse
import base64
import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.monitoring.console import means
from paco_grpo.monitoring.trackers import MetricsFile
from paco_judge.images import data_url, load_image

LABELS = {
    "consistency_score": "judge", "consistency_for_editing": "judge", "oracle_consistency": "oracle: consistency",
    "oracle_alignment": "oracle: panels show what is named", "oracle_distinct": "oracle: panels differ",
    "oracle_followed": "oracle: instruction followed", "oracle_kept": "oracle: the rest is kept",
}  # fmt: skip
HEALTH = {
    "train/grad_norm": "gradient norm", "train/ratio_mean": "mean ratio", "train/clip_share": "share of clipped samples",
    "advantage/zero_std_share": "groups without spread", "health/velocity_change": "distance to the base",
    "health/latent_std_vs_first": "spread of latents / first", "health/distinctness_vs_first": "distinctness / first",
}  # fmt: skip
PHASES = {
    "sampling": "sample",
    "waiting for rewards": "reward_wait",
    "training": "train",
    "evaluation": "eval",
}
PLOT = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.formatter.useoffset": False,
    "legend.frameon": False, "legend.fontsize": 7, "figure.constrained_layout.use": True,
}  # fmt: skip
GALLERY, SIDE = 12, 256  # image pairs, and the most pixels of a picture
STYLE = """
*{box-sizing:border-box} body{margin:0;background:#f5f6f8;color:#22262c;font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 16px} h1{font-size:26px;margin:0} h2{font-size:18px;margin:0 0 6px}
section{background:#fff;border:1px solid #e3e6ea;border-radius:10px;padding:18px 20px;margin-top:16px;overflow-x:auto}
.faint{color:#66707c;margin:0 0 12px} table{border-collapse:collapse}
th,td{padding:5px 12px;text-align:right;white-space:nowrap}
th:first-child{text-align:left} .plot{width:100%;max-width:920px;display:block;margin-top:10px} .small{max-width:460px}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:22px}
.images{display:flex;gap:8px}
figure{margin:0;flex:1;min-width:0;font-size:12px}
figure img{width:100%;display:block;border-radius:6px;image-rendering:pixelated}
.prompt{font-size:12px;margin:4px 0 0;color:#66707c}
.prompt{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden}
"""
Row = Mapping[str, Any]
Curves = dict[str, np.ndarray]  # metric -> (N, 3): epoch, mean, its standard error or NaN


@dataclass(frozen=True)
class Run:
    """A run directory ({save_dir}/{run_name}), read back."""

    config: Mapping[str, Any]  # dotted name -> value
    train: Curves  # rewards of the training samples
    test: Curves  # rewards of the evaluations
    health: Curves
    seconds: Mapping[str, float]  # phase -> total
    pairs: Sequence[
        tuple[Row, Row]
    ]  # rows of eval_data.jsonl: same prompt and seed in the first and in the last evaluation
    epochs: int


def _curve(rows: Sequence[Row], key: str, error: str = "", divisor: float = 1.0) -> np.ndarray:
    points = [(row["epoch"], row[key], row.get(error)) for row in rows if row.get(key) is not None]
    return np.array(points, dtype=float).reshape(-1, 3) / (1, 1, divisor)


def _reward_curves(rows: Sequence[Row], prefix: str, error: str, divisor: float = 1.0) -> Curves:
    names = dict.fromkeys(name for row in rows for name in means(row, prefix))
    curves = {
        name: _curve(rows, f"{prefix}{name}_mean", f"{prefix}{name}{error}", divisor)
        for name in names
    }
    return {name: curve for name, curve in curves.items() if len(curve)}


def _pictures(folder: Path) -> dict[str, Row]:
    """Rows of one evaluation with saved images, whose paths they get."""
    rows = [row for row in read_rows(folder) if row["file"]]
    return {
        row["file"]: row | {key: folder / row[key] for key in ("file", "reference") if row.get(key)}
        for row in rows
    }


def read_run(folder: Path) -> Run:
    """Read a run directory; a ``ValueError`` if it has no epoch and no evaluation yet."""
    metrics, config = MetricsFile(folder / "metrics.jsonl"), folder / "config.yaml"
    rows, train, test = metrics.rows(), metrics.rows("train"), metrics.rows("eval")
    if not train and not test:
        raise ValueError(
            f"{metrics.path} has no epoch and no evaluation yet; let the run finish one first"
        )
    saved = yaml.safe_load(config.read_bytes()) if config.is_file() else {}
    groups = [(group, values) for group, values in saved.items() if isinstance(values, dict)]
    options = saved | {
        f"{group}.{name}": value for group, values in groups for name, value in values.items()
    }
    images = options.get("sample.num_images_per_prompt", 0) * options.get(
        "sample.unique_sample_num_per_epoch", 0
    )
    seconds = {
        name: sum(row.get(f"time/{key}_s") or 0 for row in rows) for name, key in PHASES.items()
    }
    evaluations, pairs = sorted((folder / "eval").glob("epoch_*")), []
    if len(evaluations) > 1:
        before, after = _pictures(evaluations[0]), _pictures(evaluations[-1])
        # Evaluations use the same items and seeds in the same order: the file name identifies the image.
        pairs = [
            (before[n], after[n])
            for n in before
            if n in after and before[n]["prompt"] == after[n]["prompt"]
        ]
    return Run(
        config=options,
        train=_reward_curves(train, "reward/", "_std", math.sqrt(images) or math.nan),
        test=_reward_curves(test, "eval/", "_stderr"),
        health={key: _curve(train, key) for key in HEALTH if any(key in row for row in train)},
        seconds={name: value for name, value in seconds.items() if value > 0},
        pairs=pairs,
        epochs=max(row["epoch"] for row in rows),
    )


def write_report(
    run_dir: Path,
    out: Path,
    judge: Sequence[Path] = (),
    stage_seconds: Path | None = None,
    title: str | None = None,
) -> list[Path]:
    """Write the page ``out`` and its figures; returns the files written, the page first.

    Args:
        judge: JSON files of ``paco-reward accuracy --output``, the base's first; the first and the last are compared.
        stage_seconds: JSON ``{stage: seconds}`` of a larger pipeline that the run was part of.
        title: Heading; None = the run's name.
    """
    run = read_run(run_dir)
    judges = [json.loads(path.read_bytes()) for path in judge]
    stages = json.loads(stage_seconds.read_bytes()) if stage_seconds else run.seconds
    metrics = [
        name
        for name in ("accuracy", "auc")
        if len(judges) > 1 and all(name in each for each in judges)
    ]
    ends = [
        [f"judge's {name} on held-out pairs", *(f"{judges[i][name]:.3f}" for i in (0, -1))]
        for name in metrics
    ]
    accuracy = _table(["", "before training", "after"], ends)
    names = [name for name in run.train if name in run.test]
    names += [
        name for name in run.test if name.startswith("oracle_consistency") and name not in names
    ]
    # Chosen by category and place, never by score.
    sorted_pairs = sorted(run.pairs, key=lambda pair: pair[0].get("category") or "")
    places = (
        np.linspace(0, len(sorted_pairs) - 1, min(GALLERY, len(sorted_pairs))).round().astype(int)
    )
    shown_pairs = [sorted_pairs[place] for place in places]
    gallery = "".join(_card(*pair, names[:3] or list(run.test)[:2]) for pair in shown_pairs)
    with matplotlib.rc_context(PLOT):
        figures = {
            "curves": _curves(run),
            "oracle": _judge_and_oracle(run),
            "health": _health(run),
            "time": _time(stages),
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    written, shown = [], dict.fromkeys(figures, "")
    for name, figure in figures.items():
        if figure is not None:
            written.append(out.with_name(f"{out.stem}_{name}.png"))
            figure.savefig(written[-1], dpi=150)
            kind, png = (
                "plot small" if name in ("oracle", "time") else "plot",
                written[-1].read_bytes(),
            )
            shown[name] = (
                f'<img class="{kind}" alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            )
    changed = f'<p class="faint">Same prompts, same noise.</p><div class="gallery">{gallery}</div>'
    note = '<p class="faint">± and bands are one standard error; evaluations use the averaged weights.</p>'
    sections = {
        "What changed": changed if gallery else "<p>No two evaluations with saved images yet.</p>",
        "By how much": note + _measures(run) + shown["curves"],
        "Can I trust it": accuracy + shown["oracle"] + shown["health"]
        or "<p>Nothing to compare the reward with.</p>",
        "How long did it take": shown["time"] or "<p>No finished epoch yet.</p>",
    }
    title = html.escape(title or run_dir.resolve().name)
    body = "".join(f"<section><h2>{h}</h2>{s}</section>" for h, s in sections.items())
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{STYLE}</style></head>
<body><main><h1>{title}</h1><p class="faint">{html.escape(_facts(run))}</p>{body}</main></body></html>
"""
    out.write_text(page, encoding="utf-8")
    return [out, *written]


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += [
        f"<th>{html.escape(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells)
        for name, *cells in rows
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if rows else ""


def _facts(run: Run) -> str:
    train, test, seed = (
        run.config.get(name) for name in ("train.resolution", "test.resolution", "seed")
    )
    if not run.config:
        return f"{run.epochs} epochs"
    parts = [
        f"{run.epochs} epochs",
        f"trained at {train} px, evaluated at {test} px",
        f"seed {seed}",
    ]
    parts += [run.config.get("pretrained.model"), run.config.get("train.loss_type")]
    return " · ".join(map(str, parts))


def _card(before: Row, after: Row, names: Sequence[str]) -> str:
    """Before and after with scores; for edits the reference image first."""
    shown = [("reference", before["reference"], {})] if before.get("reference") else []
    shown += [
        (caption, row["file"], row["rewards"])
        for caption, row in (("before", before), ("after", after))
    ]
    images = ""
    for caption, file, scores in shown:
        image = load_image(file)
        image.thumbnail((SIDE, SIDE))
        values = {_label(name): scores.get(name) for name in (names if scores else ())}
        lines = "".join(
            f"<br>{html.escape(name)} {'–' if x is None else f'{x:.2f}'}"
            for name, x in values.items()
        )
        images += (
            f'<figure><img alt="{caption}" src="{data_url(image)}"><b>{caption}</b>{lines}</figure>'
        )
    prompt, category = html.escape(before["prompt"]), html.escape(before.get("category") or "")
    text = f'<p class="prompt" title="{prompt}">{prompt}</p>'
    return f'<article><span class="faint">{category}</span><div class="images">{images}</div>{text}</article>'


def _measures(run: Run) -> str:
    """Every evaluated reward in the first and the last evaluation, with the change."""
    rows = []
    for name, curve in run.test.items():
        ends = [
            f"{value:.3f}" + ("" if math.isnan(e) else f" ± {e:.3f}")
            for _, value, e in curve[[0, -1]]
        ]
        rows.append([_label(name), *ends, f"{curve[-1, 1] - curve[0, 1]:+.3f}"])
    return _table(["", "before", "after", "change"], rows) or "<p>No evaluation yet.</p>"


def _draw(axes: Any, curve: np.ndarray, text: str | None = None) -> None:
    epoch, value, error = curve.T
    axes.plot(epoch, value, label=text, marker="o", markersize=3)
    axes.fill_between(epoch, value - error, value + error, alpha=0.18, linewidth=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _curves(run: Run) -> Figure:
    """Rewards by epoch: training samples on the left, evaluations on the right."""
    figure = Figure(figsize=(9, 4))
    parts = {"train": ("training samples", run.train), "test": ("evaluation", run.test)}
    for axes, (part, (title, curves)) in zip(figure.subplots(1, 2), parts.items(), strict=True):
        for name, curve in curves.items():
            _draw(axes, curve, _label(name))
        side = run.config.get(f"{part}.resolution")
        axes.set_title(f"{title}, {side} px" if side else title)
        if curves:
            axes.legend()
    return figure


def _judge_and_oracle(run: Run) -> Figure | None:
    """The training reward against the oracle, image by image, in the first and the last evaluation."""
    oracle = next(
        (name for name in ("oracle_consistency", "oracle_edit") if name in run.test), None
    )
    judge = next((name for name in run.train if name in run.test and name != oracle), None)
    if oracle is None or judge is None:
        return None
    figure = Figure(figsize=(4.5, 3.6))
    axes = figure.subplots()
    for when, name in enumerate(("before", "after")):
        points = [
            [pair[when]["rewards"].get(reward) for reward in (oracle, judge)] for pair in run.pairs
        ]
        points = np.array([point for point in points if None not in point]).reshape(-1, 2)
        axes.scatter(*points.T, s=14, alpha=0.6, label=f"{name} ({len(points)} images)")
    axes.set(xlabel=_label(oracle), ylabel=_label(judge))
    axes.set_title("each image: training reward and oracle")
    axes.legend()
    return figure


def _health(run: Run) -> Figure | None:
    if not run.health:
        return None
    rows = -(-len(run.health) // 4)
    figure = Figure(figsize=(9, 2.1 * rows))
    for place, (key, curve) in enumerate(run.health.items(), start=1):
        axes = figure.add_subplot(rows, 4, place)
        _draw(axes, curve)
        axes.set_title(HEALTH[key])
    return figure


def _time(seconds: Mapping[str, float]) -> Figure | None:
    if not seconds:
        return None
    figure = Figure(figsize=(4.5, 0.6 + 0.35 * len(seconds)))
    axes = figure.subplots()
    bars = axes.barh([*seconds][::-1], [value / 60 for value in seconds.values()][::-1])
    axes.bar_label(bars, fmt="%.1f min", padding=3, fontsize=8)
    axes.margins(x=0.2)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 if there is nothing to report on."""
    parser = argparse.ArgumentParser(
        prog="python -m paco_grpo.report", description="Make one page of a run directory."
    )
    parser.add_argument("run_dir", type=Path, help="{save_dir}/{run_name} of a training run")
    judges = "files of `paco-reward accuracy --output`, the base's first"
    parser.add_argument("--judge", nargs="+", default=(), type=Path, metavar="JSON", help=judges)
    parser.add_argument(
        "--stage-seconds", type=Path, metavar="JSON", help="{stage: seconds} of the whole pipeline"
    )
    parser.add_argument("--title")
    parser.add_argument(
        "--out", type=Path, help="the page (default RUN_DIR/report.html); PNGs go next to it"
    )
    asked = parser.parse_args(argv)
    out = asked.out or asked.run_dir / "report.html"
    try:
        print(
            *write_report(asked.run_dir, out, asked.judge, asked.stage_seconds, asked.title),
            sep="\n",
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        print(
            f"error: no report on {asked.run_dir}: {type(error).__name__}: {error}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
