"""The page: one HTML file with everything inside (figures as SVG, pictures as data URIs), light and dark."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from PIL import Image

from paco_grpo.report.data import Picture, Run, open_picture
from paco_grpo.report.figures import label, short_label

_TEMPLATE = Path(__file__).with_name("page.html")
_SIDE = 256  # pixels of a picture in the page; smaller ones are enlarged without smoothing


def render(title: str, subtitle: str, sections: Sequence[str], values: Mapping[str, str]) -> str:
    """The whole page. ``values``: the headline's numbers by their names."""
    tiles = "".join(f"<div><b>{number}</b><span>{html.escape(name)}</span></div>" for name, number in values.items())
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        tiles=tiles,
        sections="\n".join(filter(None, sections)),
    )


def section(title: str, *content: str, note: str = "") -> str:
    """One section of the page; "" if it would be empty."""
    inner = "".join(content)
    if not inner:
        return ""
    note = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{note}{inner}</section>"


def facts(run: Run) -> str:
    """The run in one line."""
    train, test = run.resolutions
    model, loss = run.config.get("pretrained", {}).get("model"), run.config.get("train", {}).get("loss_type")
    parts = [
        f"{run.epochs} epochs",
        f"trained at {train} px, evaluated at {test} px" if train and test else None,
        model,
        f"objective {loss}" if loss else None,
        f"seed {run.config['seed']}" if run.config.get("seed") is not None else None,
    ]
    return " · ".join(str(part) for part in parts if part)


def measures_table(run: Run) -> str:
    """Every evaluated reward in the first and the last evaluation, with the change."""
    rows = []
    for name, curve in run.test.items():
        if curve.value:
            errors = [f' <span class="error">±{error:.3f}</span>' for error in curve.error or ()] or [""]
            first, last = (f"{curve.value[i]:.3f}{errors[i]}" for i in (0, -1))
            change = f"{curve.value[-1] - curve.value[0]:+.3f}"
            rows.append(
                f"<tr><th scope=row>{html.escape(label(name))}</th><td>{first}</td><td>{last}</td><td>{change}</td></tr>"
            )
    if not rows:
        return "<p>No evaluation yet.</p>"
    head = "<tr><th></th><th scope=col>first</th><th scope=col>last</th><th scope=col>change</th></tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def choose_pairs(pairs: Sequence[tuple[Picture, Picture]], count: int) -> list[tuple[Picture, Picture]]:
    """The first images of each category in turn: chosen by their place in the list, never by their scores."""
    seen: dict[str | None, int] = {}
    places = []
    for pair in pairs:
        category = pair[0].category
        seen[category] = seen.get(category, 0) + 1
        places.append((seen[category], list(seen).index(category), len(places)))
    return [pairs[number] for *_, number in sorted(places)[:count]]


def gallery(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str]) -> str:
    """Before and after with scores; for edits also the reference image on the left and the instruction above."""
    if not pairs:
        return "<p>No two evaluations with saved images yet.</p>"
    cards, edits = [], any(before.reference for before, _ in pairs)
    for before, after in pairs:
        prompt = html.escape(before.prompt)
        category = f'<p class="category">{html.escape(before.category)}</p>' if before.category else ""
        images = _figure("before", before.file, _scores(before, names)) + _figure(
            "after", after.file, _scores(after, names)
        )
        if before.reference:
            text = f'<p class="instruction" title="{prompt}">{prompt}</p>'
            images = f'{text}<div class="pair edit">{_figure("reference", before.reference)}{images}</div>'
        else:
            images = f'<div class="pair">{images}</div><p class="prompt" title="{prompt}">{prompt}</p>'
        cards.append(f"<article>{category}{images}</article>")
    return f'<div class="gallery{" edits" * edits}">{"".join(cards)}</div>'


def _figure(caption: str, file: Path, text: str = "") -> str:
    image, buffer = open_picture(file), io.BytesIO()
    scale = _SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    image.save(buffer, "PNG", optimize=True)
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{caption}" src="{uri}"><figcaption><em>{caption}</em>{text}</figcaption></figure>'


def _scores(picture: Picture, names: Sequence[str]) -> str:
    scores = [(html.escape(short_label(name)), picture.rewards.get(name)) for name in names]
    return "<br>".join(f"<span>{name}</span> <b>{'–' if x is None else f'{x:.3f}'}</b>" for name, x in scores)
