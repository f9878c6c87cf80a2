"""`paco-reward score`: a judge's answers about all pairs of some images, or edits of the first, as
rows or as a page.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from PIL import Image

from paco_judge.errors import UserError
from paco_judge.grid import index_pairs
from paco_judge.images import data_url, load_image
from paco_judge.judge import Judge
from paco_judge.questions import (
    EDITING,
    Pair,
    editing_texts,
    load_editing_questions,
    load_question,
)
from paco_judge.verdict import Verdict, editing_score, mean_score
from paco_reward.options import add_asking_options, judge_of

_SIDE = 192  # pixels of a picture on the page
_NO = (240, 178, 122)  # orange to blue, both light enough for dark text
_YES = (133, 193, 233)


@dataclass(frozen=True)
class PairScore:
    """The judge's answer about two images of a report."""

    first: int  # number of an image
    second: int
    dimension: str | None  # what the question about an edit is about; None: asked about all pairs
    verdict: Verdict
    reason: str | None = None  # the whole answer, if it was asked for


@dataclass(frozen=True)
class ScoreReport:
    """What a judge says about some images.

    Args:
        judge: Its name.
        images: Two or more, RGB.
        names: Of the images.
        questions: One under None, asked about every pair; or questions about edits of the first
            image, by dimension.
        answers: One for each question on each pair.
    """

    judge: str
    images: Sequence[Image.Image]
    names: Sequence[str]
    questions: Mapping[str | None, str]
    answers: Sequence[PairScore]

    @property
    def about_edits(self) -> bool:
        """Whether the images after the first are edits of it."""
        return None not in self.questions

    @property
    def missing(self) -> int:
        """How many answers have no score."""
        return sum(not answer.verdict.ok for answer in self.answers)

    @property
    def mean(self) -> float | None:
        """Mean over all pairs; None if one has no score."""
        return mean_score([answer.verdict for answer in self.answers])

    @property
    def rows(self) -> list[PairScore]:
        """The answers, and after the two answers about an edit the score that follows from them."""
        if len(self.questions) != 2:
            return list(self.answers)
        rows = []
        for both in zip(self.answers[::2], self.answers[1::2], strict=True):
            score = editing_score(*(answer.verdict for answer in both))
            verdict = Verdict(None, "an answer is missing") if score is None else Verdict(score)
            rows += [*both, PairScore(both[0].first, both[0].second, "overall", verdict)]
        return rows


def ask(
    judge: Judge,
    images: Sequence[Image.Image],
    names: Sequence[str],
    questions: Mapping[str | None, str],
    reason_tokens: int | None = None,
) -> ScoreReport:
    """The judge's P(Yes), and its whole answers if they may have ``reason_tokens``."""
    shown = index_pairs(len(images))
    if None not in questions:
        shown = [(0, edit) for edit in range(1, len(images))]
    places: list[tuple[int, int, str | None]] = []
    pairs = []
    for first, second in shown:
        for dimension, question in questions.items():
            places.append((first, second, dimension))
            pairs.append(Pair(images[first], images[second], question))
    verdicts = judge.verdicts(pairs)
    reasons: list[str | None] = [None] * len(pairs)
    if reason_tokens is not None:
        answers = judge.answers(pairs, reason_tokens)
        reasons = [answer.text or f"no answer: {answer.error}" for answer in answers]
    scores = []
    for place, verdict, reason in zip(places, verdicts, reasons, strict=True):
        scores.append(PairScore(*place, verdict, reason))
    return ScoreReport(judge.name, images, names, questions, scores)


def questions_about(
    theme: str | None = None, instruction: str | None = None, templates: Sequence[str] | None = None
) -> dict[str | None, str]:
    """``ScoreReport.questions``: on pairs, with or without a theme, or on edits.

    ``templates``: shipped names or text files, one, or for edits up to two; default: theme, pair,
    or the editing questions.
    """
    if instruction is not None:
        return dict(editing_texts(load_editing_questions(templates or EDITING), instruction))
    default = "theme" if theme else "pair"
    name, *others = templates or [default]
    if others:
        raise UserError("--question: only edits (--instruction) are asked about with two questions")
    fields = ("theme",) if theme else ()
    return {None: load_question(name, fields).text(theme=theme)}


def sheet(report: ScoreReport, whole_page: bool = False) -> str:
    """HTML with the pictures inside, to put into a page or as a ``whole_page``.

    Every text in it is escaped.
    """
    html = Path(__file__).with_name("sheet.html").read_text(encoding="utf-8")
    template = jinja2.Template(html, autoescape=True, undefined=jinja2.StrictUndefined)
    scores = {(row.first, row.second, row.dimension): row.verdict for row in report.rows}
    pictures = list(map(_picture, report.images))
    are_small = [max(image.size) < _SIDE for image in report.images]
    return template.render(
        report=report,
        rows=report.rows,
        scores=scores,
        whole_page=whole_page,
        pictures=pictures,
        small=are_small,
        color=_color,
    )


def _picture(image: Image.Image) -> str:
    thumbnail = image.copy()
    thumbnail.thumbnail((_SIDE, _SIDE))
    return data_url(thumbnail)


def _color(p_yes: float) -> str:
    channels = [no + (yes - no) * p_yes for no, yes in zip(_NO, _YES, strict=True)]
    return "rgb({:.0f} {:.0f} {:.0f})".format(*channels)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `score` to the command line."""
    text = (
        "score all pairs of images: P(Yes) and its mean; or edits of an image: the square root of "
        "the product of both answers"
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
        help="name of a question (questions.toml) or text file, two for edits; default: theme, "
        "pair, or the two editing questions",
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
