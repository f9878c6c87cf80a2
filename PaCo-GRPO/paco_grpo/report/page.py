"""The page: one HTML file with everything inside (figures as SVG, pictures as data URIs), light and dark."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from PIL import Image

from paco_grpo.report.data import Picture, Run
from paco_grpo.report.figures import label, short_label

_TEMPLATE = Path(__file__).with_name("page.html")
_PIXELS = 256  # shown side of a picture; smaller ones are enlarged without smoothing


def picture_uri(path: Path, side: int = _PIXELS) -> str:
    """A picture as a PNG data URI, its longer side about ``side`` pixels."""
    image = Image.open(path).convert("RGB")
    if max(image.size) >= side:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    else:
        factor = max(1, side // max(image.size))
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _number(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" + (f' <span class="error">±{error:.3f}</span>' if error is not None else "")


def measures_table(run: Run) -> str:
    """Every evaluated reward in the first and the last evaluation, with the gain."""
    rows = []
    for name, curve in run.test.items():
        if not curve.value:
            continue
        errors = curve.error or (None,) * len(curve.value)
        gain = curve.value[-1] - curve.value[0]
        rows.append(
            f"<tr><th scope=row>{html.escape(label(name))}</th><td>{_number(curve.value[0], errors[0])}</td>"
            f"<td>{_number(curve.value[-1], errors[-1])}</td><td>{gain:+.3f}</td></tr>"
        )
    if not rows:
        return "<p>No evaluation yet.</p>"
    head = "<tr><th></th><th scope=col>first</th><th scope=col>last</th><th scope=col>change</th></tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def choose_pairs(pairs: Sequence[tuple[Picture, Picture]], count: int) -> list[tuple[Picture, Picture]]:
    """The first images of each category in turn: chosen by their place in the list, never by their scores."""
    groups: dict[str | None, list[tuple[Picture, Picture]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].category, []).append(pair)
    chosen: list[tuple[Picture, Picture]] = []
    for place in range(max((len(g) for g in groups.values()), default=0)):
        for group in groups.values():
            if place < len(group) and len(chosen) < count:
                chosen.append(group[place])
    return chosen


def _scores(picture: Picture, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        value = picture.rewards.get(name)
        parts.append(f"<span>{html.escape(short_label(name))}</span> <b>{_number(value)}</b>")
    return "<br>".join(parts)


def gallery(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str]) -> str:
    """Before and after, side by side, with scores; for edits with the reference image on the left and the instruction above."""
    if not pairs:
        return "<p>No two evaluations with saved images yet.</p>"
    cards = []
    for pair in pairs:
        category = f'<p class="category">{html.escape(pair[0].category)}</p>' if pair[0].category else ""
        figures = "".join(
            f'<figure><img alt="{when}" src="{picture_uri(picture.file)}"><figcaption><em>{when}</em>{_scores(picture, names)}'
            "</figcaption></figure>"
            for when, picture in zip(("before", "after"), pair, strict=True)
        )
        prompt, reference = html.escape(pair[0].prompt), pair[0].reference
        if reference is None:
            text = f'<p class="prompt" title="{prompt}">{prompt}</p>'
            cards.append(f'<article>{category}<div class="pair">{figures}</div>{text}</article>')
            continue
        shown = f'<figure><img alt="reference" src="{picture_uri(reference)}"><figcaption><em>reference</em></figcaption></figure>'
        text = f'<p class="instruction" title="{prompt}">{prompt}</p>'
        cards.append(f'<article>{category}{text}<div class="pair edit">{shown}{figures}</div></article>')
    edits = " edits" if any(before.reference for before, _ in pairs) else ""
    return f'<div class="gallery{edits}">{"".join(cards)}</div>'


def facts(run: Run) -> str:
    """What was run, in one line."""
    train, test = run.resolutions
    config = run.config
    parts = [f"{run.epochs} epochs"]
    if train and test:
        parts.append(f"trained at {train} px, evaluated at {test} px")
    if config.get("pretrained", {}).get("model"):
        parts.append(str(config["pretrained"]["model"]))
    if config.get("train", {}).get("loss_type"):
        parts.append(f"objective {config['train']['loss_type']}")
    if config.get("seed") is not None:
        parts.append(f"seed {config['seed']}")
    return " · ".join(html.escape(part) for part in parts)


def section(title: str, *content: str, note: str = "") -> str:
    """One section of the page; empty contents are left out, an empty section too."""
    inner = "".join(part for part in content if part)
    if not inner:
        return ""
    note = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{note}{inner}</section>"


def figure(svg: str | None, caption: str = "") -> str:
    """A figure of the page."""
    if not svg:
        return ""
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="plot">{svg}{text}</figure>'


def render(title: str, subtitle: str, sections: Sequence[str], values: Mapping[str, str]) -> str:
    """The whole page. ``values``: the headline's numbers by what they are."""
    tiles = "".join(f"<div><b>{number}</b><span>{html.escape(what)}</span></div>" for what, number in values.items())
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title), subtitle=subtitle, tiles=tiles, sections="\n".join(s for s in sections if s)
    )
