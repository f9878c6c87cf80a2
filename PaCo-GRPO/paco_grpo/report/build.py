"""Writes a report: the page with figures as SVG inside it, and the same figures as PNG files next to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_grpo.report import figures, page
from paco_grpo.report.data import ReportError, Run, is_number, read_run
from paco_grpo.report.style import save_png, svg
from paco_judge.json_io import DamagedJson, parse_object

GALLERY = 12  # image pairs in the page
SHEET = 8  # and in the picture file


def write_report(
    run_dir: str | Path,
    out: str | Path,
    *,
    judge: Sequence[str | Path] = (),
    stage_seconds: str | Path | None = None,
    title: str | None = None,
) -> list[Path]:
    """Write the page and its PNGs.

    Args:
        run_dir: A run directory of PaCo-GRPO.
        out: The page; PNGs go next to it, named after it.
        judge: JSON files of ``paco-reward accuracy --output``, the base's first; the first and the last are compared.
        stage_seconds: JSON ``{stage: seconds}`` of a larger pipeline that the run was part of.
        title: Heading; None = the run's name.

    Returns:
        The files written, the page first.

    Raises:
        ReportError: Something needed is missing or unreadable; before anything is written.
    """
    run = read_run(run_dir)
    judges = [_read_json(Path(path), ("accuracy", "auc", "n")) for path in judge]
    stages = _read_json(Path(stage_seconds)) if stage_seconds else {}
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)

    names, pairs = _caption_names(run), page.choose_pairs(run.pairs, SHEET)
    plots = {
        "curves": figures.reward_curves(run),
        "images": figures.side_curves(run),
        "judge": figures.judge_bars(judges[0], judges[-1]) if len(judges) > 1 else None,
        "stages": figures.stage_bars(stages, "The whole pipeline") if stages else None,
        "time": figures.stage_bars(run.seconds, "This run") if run.seconds else None,
        "diagnostics": figures.diagnostic_curves(run),
        "before_after": figures.before_after(pairs, names) if pairs else None,
    }
    written, inline = [], dict.fromkeys(plots, "")
    for name, figure in plots.items():
        if figure is not None:
            written.append(out.with_name(f"{out.stem}_{name}.png"))
            save_png(figure, written[-1])
            if name != "before_after":  # the page has a gallery instead
                inline[name] = f'<figure class="plot">{svg(figure, name)}</figure>'
    bars = inline["judge"] + inline["stages"] + inline["time"]
    sections = [
        page.section(
            "Before and after",
            page.gallery(page.choose_pairs(run.pairs, GALLERY), names),
            note="Same prompts, same noise. The first images of each category, not chosen by score.",
        ),
        page.section(
            "Curves",
            inline["curves"],
            inline["images"],
            note="Bands are one standard error. Evaluations use the averaged (EMA) weights and fixed prompts and noise.",
        ),
        page.section("All evaluated measures", page.measures_table(run)),
        page.section("Judge and time", f'<div class="columns">{bars}</div>' if bars else ""),
        page.section("Health of the run", inline["diagnostics"]),
    ]
    text = page.render(title or run.name, page.facts(run), sections, _headline(run, judges, names))
    out.write_text(text, encoding="utf-8")
    return [out, *written]


def _read_json(path: Path, numbers: Collection[str] | None = None) -> dict[str, Any]:
    """A JSON object whose ``numbers`` (None: all values) are numbers, or absent. Raises ReportError."""
    try:
        found = parse_object(path.read_bytes())
    except (OSError, DamagedJson) as error:
        raise ReportError(f"{path} cannot be used: {error}") from error
    for name in found if numbers is None else found.keys() & numbers:
        if found[name] is not None and not is_number(found[name]):
            raise ReportError(f"{path} cannot be used: {name} is not a number but {found[name]!r}")
    return found


def _caption_names(run: Run) -> list[str]:
    """The scores under each picture: rewards of both training and evaluation, and the oracle's consistency."""
    names = [name for name in run.train if name in run.test]
    names += [name for name in run.test if name.startswith("oracle_consistency") and name not in names]
    return names[:3] or list(run.test)[:2]


def _headline(run: Run, judges: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """The few numbers at the top."""
    values = {}
    if len(judges) > 1:
        values["judge's accuracy on held-out pairs"] = f"{judges[0]['accuracy']:.2f} → {judges[-1]['accuracy']:.2f}"
    for name in names:
        curve = run.test[name]
        if len(curve.value) > 1:
            values[figures.label(name)] = f"{curve.value[0]:.2f} → {curve.value[-1]:.2f}"
    return values
