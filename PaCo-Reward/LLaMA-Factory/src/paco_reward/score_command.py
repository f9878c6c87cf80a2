"""`paco-reward score`: how consistent some images are, or how good an edit is, as a table."""

import argparse
from pathlib import Path

from paco_judge.images import load_image
from paco_judge.questions import add_form_arguments
from paco_reward import sheet
from paco_reward.answers import Answers, judge_named, questions_about
from paco_reward.errors import PacoRewardError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `score` to the command line."""
    text = (
        "Prints the judge's P(Yes) for every pair of the images, and the mean. With --instruction, the other images are "
        "edits of the first: does each follow the instruction, is all else consistent, and the root of the product."
    )
    parser = commands.add_parser("score", help="score all pairs of some images, or edits of an image", description=text)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="two or more image files or URLs")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--theme", help="theme sentence of the images; default: asked without a theme")
    asked.add_argument("--instruction", help="the images after the first are edits of it, made with this instruction")
    text = "shipped template or text file, two for edits; default: theme, pair, or the two editing questions"
    parser.add_argument("--question", nargs="+", metavar="NAME|FILE", help=text)
    parser.add_argument("--reasons", action="store_true", help="print the judge's whole answers too")
    parser.add_argument("--html", metavar="FILE", help="also write images, scores and reasons as a page")
    add_asking_options(parser)
    parser.set_defaults(command=run)


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``judge_named``."""
    parser.add_argument("--reason_tokens", type=positive, default=512, help="longest answer (default %(default)s)")
    add_judge_options(parser)
    parser.add_argument("--server", metavar="URL", help="ask an OpenAI-compatible server instead of loading a model")
    parser.add_argument("--api_key_env", metavar="VARIABLE", help="environment variable with the server's key")


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``load_judge``."""
    parser.add_argument("--model", "--base", dest="model", help="model folder or hub name (served name with --server)")
    parser.add_argument("--adapter", help="adapter folder for the model")
    parser.add_argument("--batch_size", type=positive, default=32, help="pairs per forward pass (default %(default)s)")
    add_form_arguments(parser)


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Ask and print; the exit status is 0 only if every pair has a score."""
    if len(args.images) < 2:
        raise PacoRewardError("give at least two images")
    questions = questions_about(args.theme, args.instruction, args.question)
    images = [load_image(source) for source in args.images]
    judge = judge_named(args)
    answers = Answers(judge.name, images, args.images, questions).scored(judge)
    if args.reasons:
        answers = answers.explained(judge)
    reasons, width = dict(zip(answers.cells, answers.reasons)), max(map(len, args.images))
    for cell, verdict in answers.scores.items():
        i, j, dimension = cell
        shown = f"{verdict.p_yes:.4f}" if verdict.ok else f"no score: {verdict.error}"
        print(f"{args.images[i]:<{width}}  {args.images[j]:<{width}}  {dimension:<{18 * answers.about_edits}}{shown}")
        if cell in reasons:
            print(f"    {reasons[cell]}")
    if args.html:
        Path(args.html).write_text(sheet.page(answers), encoding="utf-8")
    if answers.missing:
        raise PacoRewardError(f"{answers.missing} of {len(answers.verdicts)} answers have no score, so there is no mean")
    if not answers.about_edits:
        print(f"mean  {answers.mean:.4f}")
    return 0
