"""One HTML page about a run: what changed, by how much, whether to trust it, how long it took. Figures are by matplotlib."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from paco_grpo.report.data import Curve, Picture, ReportError, Run, read_run
from paco_judge.images import UnreadableImage, read_image

LABELS = {
    "consistency_score": "judge", "consistency_for_editing": "judge", "oracle_consistency": "oracle: consistency",
    "oracle_alignment": "oracle: panels show what is named", "oracle_distinct": "oracle: panels differ",
    "oracle_followed": "oracle: instruction followed", "oracle_kept": "oracle: the rest is kept",
}  # fmt: skip
HEALTH = {
    "grad_norm": "gradient norm", "ratio_mean": "mean ratio", "clip_share": "share of clipped samples",
    "zero_std_share": "share of groups without spread", "velocity_change": "distance to the base",
    "pixel_std_vs_first": "contrast / first", "pixel_detail_vs_first": "detail / first",
    "distinctness_vs_first": "distinctness / first",
}  # fmt: skip
GALLERY, SIDE = 12, 256  # image pairs, and pixels of a picture
STYLE = """
*{box-sizing:border-box} body{margin:0;background:#f5f6f8;color:#22262c;font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 16px 64px} h1{font-size:26px;line-height:1.2;margin:0} h2{font-size:18px;margin:0 0 6px}
.faint{color:#66707c;margin:0 0 12px} section{background:#fff;border:1px solid #e3e6ea;border-radius:10px;padding:18px 20px;margin-top:16px}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-variant-numeric:tabular-nums} th,td{padding:5px 12px;text-align:right;white-space:nowrap}
th:first-child{text-align:left} .plot{width:100%;max-width:920px;display:block;margin-top:10px} .small{max-width:460px}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:22px}
.images{display:flex;gap:8px} figure{margin:0;flex:1;min-width:0;font-size:12px} figure img{width:100%;display:block;border-radius:6px;image-rendering:pixelated}
.prompt{font-size:12px;margin:4px 0 0;color:#66707c;display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden}
"""


def write_report(
    run_dir: str | Path,
    out: str | Path,
    *,
    judge: Sequence[str | Path] = (),
    stage_seconds: str | Path | None = None,
    title: str | None = None,
) -> list[Path]:
    """Write the page, and its figures as PNG files next to it.

    Args:
        run_dir: A run directory of PaCo-GRPO.
        out: The page.
        judge: JSON files of ``paco-reward accuracy --output``, the base's first; the first and the last are compared.
        stage_seconds: JSON ``{stage: seconds}`` of a larger pipeline that the run was part of.
        title: Heading; None = the run's name.

    Returns:
        The files written, the page first.

    Raises:
        ReportError: Something needed is missing or unreadable; before anything is written.
    """
    run, out = read_run(run_dir), Path(out)
    judges = [_read_json(Path(path)) for path in judge]
    stages = _read_json(Path(stage_seconds)) if stage_seconds else {}
    gallery = "".join(_card(*pair, _caption_names(run)) for pair in choose_pairs(run.pairs, GALLERY))
    table = _judge_table(judges)
    figures = {
        "curves": _curves(run), "oracle": _judge_and_oracle(run), "health": _health(run), "time": _time(stages or run.seconds),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    written, inline = [], dict.fromkeys(figures, "")
    for name, figure in figures.items():
        if figure is not None:
            written.append(out.with_name(f"{out.stem}_{name}.png"))
            figure.savefig(written[-1], dpi=150)
            small = " small" if name in ("oracle", "time") else ""
            inline[name] = f'<img class="plot{small}" alt="{name}" src="{_uri(written[-1].read_bytes())}">'
    missing = "<p>No two evaluations with saved images yet.</p>"
    sections = [
        _section("What changed", f'<div class="gallery">{gallery}</div>' if gallery else missing,
                 "Same prompts, same noise. The first images of each category, not chosen by score."),
        _section("By how much", _measures(run) + inline["curves"], "± and bands are one standard error; evaluations use the averaged weights."),
        _section("Can I trust it", table + inline["oracle"] + inline["health"] or "<p>Nothing to compare the reward with.</p>"),
        _section("How long did it take", inline["time"] or "<p>No finished epoch yet.</p>"),
    ]  # fmt: skip
    title = html.escape(title or run.name)
    head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title><style>{STYLE}</style></head>'
    body = f'<body><main><h1>{title}</h1><p class="faint">{html.escape(_facts(run))}</p>{"".join(sections)}</main></body></html>\n'
    out.write_text(head + body, encoding="utf-8")
    return [out, *written]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) | {}
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} cannot be used: {error}") from error


def label(name: str) -> str:
    """A metric's name in words."""
    return LABELS.get(name, name.replace("_", " "))


def _section(title: str, content: str, note: str = "") -> str:
    note = f'<p class="faint">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note}{content}</section>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the header first."""
    head, *body = ("".join(f"<th>{html.escape(row[0])}</th>" if not i else f"<{tag}>{cell}</{tag}>" for i, cell in enumerate(row))
                   for row, tag in zip(rows, ["th", *["td"] * len(rows)]))  # fmt: skip
    return f'<div class="scroll"><table>{"".join(f"<tr>{row}</tr>" for row in (head, *body))}</table></div>'


def _uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _facts(run: Run) -> str:
    """The run in one line."""
    train, test, seed = run.option("train.resolution"), run.option("test.resolution"), run.option("seed")
    parts = [f"{run.epochs} epochs", f"trained at {train} px, evaluated at {test} px" if train and test else None]
    parts += [run.option("pretrained.model"), run.option("train.loss_type"), None if seed is None else f"seed {seed}"]
    return " · ".join(str(part) for part in parts if part)


def choose_pairs(pairs: Sequence[tuple[Picture, Picture]], count: int) -> list[tuple[Picture, Picture]]:
    """The first images of each category in turn: chosen by their place in the list, never by their scores."""
    seen: dict[str, int] = {}
    places = []
    for number, (before, _) in enumerate(pairs):
        seen[before.category] = seen.get(before.category, 0) + 1
        places.append((seen[before.category], list(seen).index(before.category), number))
    return [pairs[number] for *_, number in sorted(places)[:count]]


def _caption_names(run: Run) -> list[str]:
    """The scores under each picture: rewards of both training and evaluation, and the oracle's consistency."""
    names = [name for name in run.train if name in run.test]
    names += [name for name in run.test if name.startswith("oracle_consistency") and name not in names]
    return names[:3] or list(run.test)[:2]


def _card(before: Picture, after: Picture, names: Sequence[str]) -> str:
    """Before and after with scores; for edits the reference image first."""
    images = [_figure("reference", before.reference, {})] if before.reference else []
    for caption, picture in (("before", before), ("after", after)):
        images.append(_figure(caption, picture.file, {label(name): picture.rewards.get(name) for name in names}))
    prompt, category = html.escape(before.prompt), html.escape(before.category)
    text = f'<p class="prompt" title="{prompt}">{prompt}</p>'
    return f'<article><span class="faint">{category}</span><div class="images">{"".join(images)}</div>{text}</article>'


def _figure(caption: str, file: Path, scores: Mapping[str, float | None]) -> str:
    try:
        image = read_image(file)
    except UnreadableImage as error:
        raise ReportError(f"image {file} {error}, or remove it") from error
    scale, buffer = SIDE / max(image.size), io.BytesIO()
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    kind = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    image.resize(size, kind).save(buffer, "PNG", optimize=True)
    lines = "".join(f"<br>{html.escape(name)} {'–' if x is None else f'{x:.2f}'}" for name, x in scores.items())
    return f'<figure><img alt="{caption}" src="{_uri(buffer.getvalue())}"><b>{caption}</b>{lines}</figure>'


def _measures(run: Run) -> str:
    """Every evaluated reward in the first and the last evaluation, with the change."""
    rows = [["", "before", "after", "change"]]
    for name, curve in run.test.items():
        if len(curve.value):
            cells = [
                f"{curve.value[i]:.3f}" + ("" if math.isnan(curve.error[i]) else f" ± {curve.error[i]:.3f}")
                for i in (0, -1)
            ]
            rows.append([label(name), *cells, f"{curve.value[-1] - curve.value[0]:+.3f}"])
    return _table(rows) if len(rows) > 1 else "<p>No evaluation yet.</p>"


def _judge_table(judges: Sequence[dict[str, Any]]) -> str:
    """The judge's accuracy on held-out pairs, before and after its training."""
    rows = [["", "before training", "after"]]
    for name in ("accuracy", "auc") if len(judges) > 1 else ():
        values = [judges[i].get(name) for i in (0, -1)]
        if None not in values:
            rows.append([f"judge's {name} on held-out pairs", *(f"{value:.3f}" for value in values)])
    return _table(rows) if len(rows) > 1 else ""


def _draw(axes: Any, name: str, curve: Curve) -> None:
    (line,) = axes.plot(
        curve.epoch, curve.value, label=label(name), marker="o" if len(curve.epoch) < 12 else None, markersize=3
    )
    low, high = curve.value - curve.error, curve.value + curve.error
    axes.fill_between(curve.epoch, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _curves(run: Run) -> Figure:
    """Rewards by epoch: training samples on the left, evaluations on the right."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, part, title in zip(
        figure.subplots(1, 2), ("train", "test"), ("training samples", "evaluation"), strict=True
    ):
        found, side = getattr(run, part), run.option(f"{part}.resolution")
        for name, curve in found.items():
            _draw(axes, name, curve)
        axes.set_title(f"{title}, {side} px" if side else title, fontsize=10)
        if found:
            axes.legend(fontsize=7, frameon=False)
    return figure


def _judge_and_oracle(run: Run) -> Figure | None:
    """The training reward against the oracle, image by image, in the first and the last evaluation."""
    oracle = next((name for name in ("oracle_consistency", "oracle_edit") if name in run.test), None)
    judge = next((name for name in run.train if name in run.test and name != oracle), None)
    if oracle is None or judge is None:
        return None
    figure = Figure(figsize=(4.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for when, name in enumerate(("before", "after")):
        points = [[pair[when].rewards.get(reward) for reward in (oracle, judge)] for pair in run.pairs]
        points = np.array([point for point in points if None not in point]).reshape(-1, 2)
        axes.scatter(*points.T, s=14, alpha=0.6, label=f"{name} ({len(points)} images)")
    axes.set(xlabel=label(oracle), ylabel=label(judge))
    axes.set_title("each image: training reward and oracle", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return figure


def _health(run: Run) -> Figure | None:
    """Signs of collapse and of a broken update, by epoch."""
    names = [name for name in HEALTH if name in run.diagnostics]
    if not names:
        return None
    rows = -(-len(names) // 4)
    figure = Figure(figsize=(9, 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, squeeze=False).flat
    for name, axes in zip(names, grid, strict=False):
        _draw(axes, name, run.diagnostics[name])
        axes.set_title(HEALTH[name], fontsize=9)
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in grid:
        axes.set_visible(False)
    return figure


def _time(seconds: Mapping[str, float]) -> Figure | None:
    """Minutes of each phase or stage."""
    if not seconds:
        return None
    figure = Figure(figsize=(4.5, 0.6 + 0.35 * len(seconds)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([*seconds][::-1], [value / 60 for value in seconds.values()][::-1])
    axes.bar_label(bars, fmt="%.1f min", padding=3, fontsize=8)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
