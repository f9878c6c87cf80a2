"""`paco-reward score`: a judge's answers about all pairs of some images, or edits of the first."""

import argparse
from pathlib import Path

from paco_judge.errors import UserError
from paco_judge.images import load_image
from paco_reward.asking import ScoreReport, ask, questions_about, sheet
from paco_reward.options import add_asking_options, judge_of


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `score` to the command line."""
    text = (
        "P(Yes) of all pairs of some images and its mean, or of edits of an image and the root of "
        "both answers' product"
    )
    parser = commands.add_parser("score", help=text, description=text)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="two or more image files or URLs"
    )
    about = parser.add_mutually_exclusive_group()
    about.add_argument(
        "--theme", help="theme sentence of the images; default: asked without a theme"
    )
    about.add_argument(
        "--instruction",
        help="the images after the first are edits of it, made with this instruction",
    )
    parser.add_argument(
        "--question",
        nargs="+",
        metavar="NAME|FILE",
        help="shipped template or text file, two for edits; default: theme, pair, or the two "
        "editing questions",
    )
    parser.add_argument(
        "--reasons", action="store_true", help="print the judge's whole answers too"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write images, scores and reasons as a page"
    )
    add_asking_options(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Ask and print; the exit status is 0 only if every pair has a score."""
    if len(args.images) < 2:
        raise UserError("give at least two images")
    questions = questions_about(args.theme, args.instruction, args.question)
    images = [load_image(source) for source in args.images]
    if args.html:
        Path(args.html).parent.mkdir(parents=True, exist_ok=True)
    reason_tokens = args.reason_tokens if args.reasons else None
    report = ask(judge_of(args), images, args.images, questions, reason_tokens)
    print_rows(report)
    if args.html:
        Path(args.html).write_text(sheet(report, whole_page=True), encoding="utf-8")
    if report.missing:
        raise UserError(
            f"{report.missing} of {len(report.answers)} answers have no score, so there is no mean"
        )
    if not report.about_edits:
        print(f"mean  {report.mean:.4f}")
    return 0


def print_rows(report: ScoreReport) -> None:
    """One line for each score, and below it the reason."""
    width = max(map(len, report.names))
    for row in report.rows:
        cells = [f"{report.names[number]:<{width}}" for number in (row.first, row.second)]
        if row.dimension is not None:
            cells.append(f"{row.dimension:<16}")
        if row.verdict.ok:
            cells.append(f"{row.verdict.p_yes:.4f}")
        else:
            cells.append(f"no score: {row.verdict.error}")
        print("  ".join(cells))
        if row.reason is not None:
            print(f"    {row.reason}")
