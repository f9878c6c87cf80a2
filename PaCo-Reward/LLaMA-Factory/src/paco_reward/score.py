"""`paco-reward score`: what a judge says about some images, all pairs of them or edits of the first."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from paco_judge.client import DEFAULT_MODEL, JudgeClient, Pair
from paco_judge.grid import pairs as index_pairs
from paco_judge.images import data_url, load_image
from paco_judge.questions import (
    EDITING,
    RequestForm,
    add_form_arguments,
    editing_texts,
    form_of,
    load_editing_questions,
    load_question,
)
from paco_judge.verdict import TOP_LOGPROBS, Verdict, editing_score, mean_score
from paco_reward.errors import PacoRewardError

_SIDE = 192  # pixels of a picture in the HTML
_NO, _YES = (240, 178, 122), (133, 193, 233)  # orange to blue, both light enough for dark text


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `score` to the command line."""
    text = "P(Yes) of all pairs of some images and its mean, or of edits of an image and the root of both answers' product"
    parser = commands.add_parser("score", help=text, description=text)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="two or more image files or URLs"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--theme", help="theme sentence of the images; default: asked without a theme"
    )
    asked.add_argument(
        "--instruction",
        help="the images after the first are edits of it, made with this instruction",
    )
    text = "shipped template or text file, two for edits; default: theme, pair, or the two editing questions"
    parser.add_argument("--question", nargs="+", metavar="NAME|FILE", help=text)
    parser.add_argument(
        "--reasons", action="store_true", help="print the judge's whole answers too"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write images, scores and reasons as a page"
    )
    add_asking_options(parser)
    parser.set_defaults(command=run)


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``judge_named`` reads."""
    parser.add_argument(
        "--reason_tokens", type=positive, default=512, help="longest answer (default %(default)s)"
    )
    add_judge_options(parser)
    parser.add_argument(
        "--server", metavar="URL", help="ask an OpenAI-compatible server instead of loading a model"
    )
    parser.add_argument(
        "--api_key_env", metavar="VARIABLE", help="environment variable with the server's key"
    )


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``load_judge`` reads."""
    parser.add_argument(
        "--model",
        "--base",
        dest="model",
        help="model folder or hub name (served name with --server)",
    )
    parser.add_argument("--adapter", help="adapter folder for the model")
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=32,
        help="pairs per forward pass (default %(default)s)",
    )
    add_form_arguments(parser)


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


@dataclass(frozen=True)
class Judge:
    """A judge in this process or behind a server."""

    name: str
    score: Callable[[Sequence[Pair]], list[Verdict]]
    explain: Callable[[Sequence[Pair]], list[str]]  # the whole answer to each pair


def load_judge(args: argparse.Namespace) -> Any:
    """The ``JudgeScorer`` that a command line names. Raises ValueError or OSError."""
    from paco_judge.scorer import JudgeScorer, silence_transformers

    if not args.model:
        raise PacoRewardError(
            "name the judge: --model FOLDER or hub NAME, with --adapter FOLDER, or --server URL"
        )
    silence_transformers()
    return JudgeScorer.from_pretrained(
        args.model, args.adapter, batch_size=args.batch_size, form=form_of(args)
    )


def client_of(args: argparse.Namespace, model: str, form: RequestForm) -> JudgeClient:
    """The client of --server and --api_key_env (other users can see command lines, hence a variable)."""
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    if args.api_key_env and not key:
        raise PacoRewardError(
            f"--api_key_env {args.api_key_env}: this environment variable is not set; export it"
        )
    return JudgeClient(args.server, model, api_key=key, max_concurrency=16, form=form)


def judge_named(args: argparse.Namespace) -> Judge:
    """The judge that a command line names, loaded or on a server. Raises ValueError or OSError."""
    if not args.server:
        judge = load_judge(args)
        name = f"{args.model} with {args.adapter}" if args.adapter else args.model
        return Judge(
            name,
            partial(judge.score, top=TOP_LOGPROBS),
            partial(judge.reasons, max_new_tokens=args.reason_tokens),
        )
    if args.adapter:
        raise PacoRewardError(
            "--adapter needs a local model; serve the adapter and name it with --model"
        )
    client = client_of(args, args.model or DEFAULT_MODEL, form_of(args))

    def explain(pairs: Sequence[Pair]) -> list[str]:
        answers = client.generate(pairs, args.reason_tokens)
        return [answer.text or f"no answer: {answer.error}" for answer in answers]

    return Judge(f"{client.model} at {client.base_url}", client.score, explain)


Cell = tuple[
    int, int, str
]  # the numbers of two images, and the dimension of the question about them


@dataclass(frozen=True)
class ScoreReport:
    """What a judge says about some images."""

    judge: str
    images: Sequence[Image.Image]  # two or more, RGB
    names: Sequence[str]  # of the images
    questions: Mapping[
        str, str
    ]  # one under "", on every pair; or, about edits of the first image, each by its dimension
    scores: Mapping[
        Cell, Verdict
    ]  # on edits with both questions, also of the dimension ``overall``
    reasons: Mapping[Cell, str]

    @property
    def about_edits(self) -> bool:
        return "" not in self.questions

    @property
    def missing(self) -> int:
        return sum(not verdict.ok for verdict in self.scores.values())

    @property
    def mean(self) -> float | None:
        """Mean over all pairs; None if one has no score."""
        return mean_score(list(self.scores.values()))


def ask(
    judge: Judge,
    images: Sequence[Image.Image],
    names: Sequence[str],
    questions: Mapping[str, str],
    reasons: bool = False,
) -> ScoreReport:
    """The judge's P(Yes), and its ``reasons`` if they are wanted."""
    cells = [(0, edit, dimension) for edit in range(1, len(images)) for dimension in questions]
    if "" in questions:
        cells = [(i, j, "") for i, j in index_pairs(len(images))]
    pairs = [Pair(images[i], images[j], questions[dimension]) for i, j, dimension in cells]
    scores = dict(zip(cells, judge.score(pairs), strict=True))
    for edit in range(1, len(images)) if len(questions) == 2 else ():
        overall = editing_score(*(scores[0, edit, dimension] for dimension in questions))
        scores[0, edit, "overall"] = Verdict(
            overall, None if overall is not None else "an answer is missing"
        )
    scores = {cell: scores[cell] for cell in sorted(scores, key=lambda cell: cell[:2])}
    return ScoreReport(
        judge.name,
        images,
        names,
        questions,
        scores,
        dict(zip(cells, judge.explain(pairs))) if reasons else {},
    )


def questions_about(
    theme: str | None = None, instruction: str | None = None, templates: Sequence[str] | None = None
) -> dict[str, str]:
    """``ScoreReport.questions``: on pairs with or without a theme, or, given an instruction, on edits.

    ``templates``: shipped names or text files, one, or for edits up to two; default: theme, pair, or the editing questions.
    """
    if instruction is not None:
        return editing_texts(load_editing_questions(templates or EDITING), instruction)
    about, default = (("theme",), "theme") if theme else ((), "pair")
    question, *others = templates or [default]
    if others:
        raise PacoRewardError(
            "--question: only edits (--instruction) are asked about with two questions"
        )
    return {"": load_question(question, about).text(theme=theme)}


def sheet(report: ScoreReport, whole_page: bool = False) -> str:
    """HTML with the pictures inside, to put into a page or as a ``whole_page``; every text in it is escaped."""
    html = Path(__file__).with_name("sheet.html").read_text(encoding="utf-8")
    return jinja2.Template(html, autoescape=True, undefined=jinja2.StrictUndefined).render(
        report=report,
        whole_page=whole_page,
        pictures=[_picture(image) for image in report.images],
        small=[max(image.size) < _SIDE for image in report.images],
        color=_color,
    )


def _picture(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((_SIDE, _SIDE))
    return data_url(small)


def _color(p_yes: float) -> str:
    return "rgb({:.0f} {:.0f} {:.0f})".format(
        *(no + (yes - no) * p_yes for no, yes in zip(_NO, _YES, strict=True))
    )


def run(args: argparse.Namespace) -> int:
    """Ask and print; the exit status is 0 only if every pair has a score."""
    if len(args.images) < 2:
        raise PacoRewardError("give at least two images")
    questions = questions_about(args.theme, args.instruction, args.question)
    images = [load_image(source) for source in args.images]
    report = ask(judge_named(args), images, args.images, questions, args.reasons)
    width = max(map(len, args.images))
    for cell, verdict in report.scores.items():
        i, j, dimension = cell
        shown = f"{verdict.p_yes:.4f}" if verdict.ok else f"no score: {verdict.error}"
        print(
            f"{args.images[i]:<{width}}  {args.images[j]:<{width}}  {dimension:<{18 * report.about_edits}}{shown}"
        )
        if cell in report.reasons:
            print(f"    {report.reasons[cell]}")
    if args.html:
        Path(args.html).write_text(sheet(report, whole_page=True), encoding="utf-8")
    if report.missing:
        raise PacoRewardError(
            f"{report.missing} of {len(report.scores)} answers have no score, so there is no mean"
        )
    if not report.about_edits:
        print(f"mean  {report.mean:.4f}")
    return 0
