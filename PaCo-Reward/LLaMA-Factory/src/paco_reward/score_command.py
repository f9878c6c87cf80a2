"""`paco-reward score`: how consistent some images are, or how good an edit is, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paco_judge.client import DEFAULT_MODEL, Pair
from paco_judge.images import data_url, load_image
from paco_judge.questions import add_form_arguments, build_messages, form_of
from paco_judge.verdict import Verdict
from paco_reward import sheet
from paco_reward.answers import Answers, Asked, Judge, questions_about
from paco_reward.errors import PacoRewardError, user_errors, writing
from paco_reward.server import Server, api_key, ask_all

if TYPE_CHECKING:
    from paco_judge.scorer import JudgeScorer

TOP_LOGPROBS = 20  # as requested from servers: the same pairs have a score either way (docs/method.md §1)
EXAMPLES = """\
examples:
  all pairs of some images, with the judge's reasons
    paco-reward score a.png b.png c.png --theme "one red fox in four seasons" --model path/to/judge --reasons
  a base model with an adapter; a running server
    paco-reward score a.png b.png --model Qwen/Qwen2.5-VL-7B-Instruct --adapter checkpoints/paco-reward-7b_lora_sft
    paco-reward score a.png b.png --server http://127.0.0.1:8000
  edits of the first image
    paco-reward score photo.png edit1.png edit2.png --instruction "make the car blue" --model path/to/judge
  the same as a page to look at
    paco-reward score a.png b.png c.png --model path/to/judge --html scores.html
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `score` to the command line."""
    parser = commands.add_parser(
        "score",
        help="score all pairs of some images, or edits of an image",
        description="Prints the judge's P(Yes) for every pair of the images, and the mean. With --instruction, the other "
        "images are edits of the first: whether each follows the instruction, whether everything else stayed consistent, "
        "and the square root of the product.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    if (number := int(text)) < 1:
        raise ValueError
    return number


def load_judge(args: argparse.Namespace) -> JudgeScorer:
    """The judge that the options name.

    Raises:
        PacoRewardError: It cannot be loaded.
    """
    from paco_judge.scorer import JudgeScorer, silence_transformers

    if not args.model:
        raise PacoRewardError("name the judge: --model FOLDER or hub NAME, with --adapter FOLDER, or --server URL")
    silence_transformers()
    with user_errors():
        return JudgeScorer.from_pretrained(args.model, args.adapter, batch_size=args.batch_size, form=form_of(args))


def run(args: argparse.Namespace) -> int:
    """Ask and print; the exit status is 0 only if every pair has a score."""
    if len(args.images) < 2:
        raise PacoRewardError("a score compares images: name at least two")
    if args.instruction is not None and not args.instruction.strip():
        raise PacoRewardError("--instruction is empty; give the text that the edit was made with")
    questions = questions_about(args.theme, args.instruction, args.question)
    with user_errors():
        asked = Asked([load_image(source) for source in args.images], args.images, questions)
        judge = judge_named(args)
        verdicts = judge.score(asked.pairs)
        answers = Answers(judge.name, asked, verdicts, judge.explain(asked.pairs) if args.reasons else ())
    (_print_edits if asked.about_edits else _print_pairs)(answers)
    if args.html:
        with writing(Path(args.html)):
            Path(args.html).write_text(sheet.page(answers), encoding="utf-8")
    if answers.missing:
        raise PacoRewardError(f"{answers.missing} of {len(verdicts)} answers have no score, so there is no mean")
    if not asked.about_edits:
        print(f"{'mean':<{2 * max(map(len, args.images)) + 2}}  {answers.mean:.4f}")
    return 0


def _print_pairs(answers: Answers) -> None:
    names = answers.asked.names
    width = max(map(len, names))
    for number, (i, j, _) in enumerate(answers.asked.cells):
        print(f"{names[i]:<{width}}  {names[j]:<{width}}  {_shown(answers.verdicts[number])}")
        if answers.reasons:
            print(f"    {answers.reasons[number]}")


def _print_edits(answers: Answers) -> None:
    names = answers.asked.names
    width, count = max(map(len, ["edit", *names[1:]])), len(answers.asked.questions)
    print(f"{'edit':<{width}}  " + "  ".join(f"{name:>16}" for name in answers.of_edit(1)))
    for number, name in enumerate(names[1:]):
        cells = map(_shown, answers.of_edit(number + 1).values())
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>16}" for cell in cells))
        reasons = answers.reasons[number * count : (number + 1) * count]
        for dimension, reason in zip(answers.asked.questions, reasons):
            print(f"    {dimension}: {reason}")


def _shown(verdict: Verdict) -> str:
    return f"{verdict.p_yes:.4f}" if verdict.ok else f"no score: {verdict.error}"


def judge_named(args: argparse.Namespace) -> Judge:
    """The judge of ``add_asking_options``: loaded, or behind a server.

    Raises:
        PacoRewardError: It cannot be loaded, or options contradict each other.
    """
    if not args.server:
        judge = load_judge(args)
        name = f"{args.model} with {args.adapter}" if args.adapter else args.model
        return Judge(name, partial(judge.score, top=TOP_LOGPROBS), partial(judge.reasons, max_new_tokens=args.reason_tokens))
    if args.adapter:
        raise PacoRewardError("--adapter needs a local model; serve the adapter and name it with --model")
    form = form_of(args)
    server = Server(args.server, args.model or DEFAULT_MODEL, api_key(args.api_key_env), timeout_s=600.0, form=form)

    def messages(pair: Pair) -> list[dict]:
        return build_messages(*(data_url(image, form.image_format) for image in pair.images), pair.question, form)

    def explain(pairs: Sequence[Pair]) -> list[str]:
        answers: dict[str, str] = {}
        questions = {str(number): partial(messages, pair) for number, pair in enumerate(pairs)}
        refused = ask_all(server, questions, answers.__setitem__, "reasons", args.reason_tokens)
        return [answers.get(key) or f"no answer: {refused.get(key)}" for key in questions]

    return Judge(f"{server.model} at {server.url}", server.score, explain)
