"""`paco-reward score`: how consistent some images are, or how good an edit is, as a table."""

import argparse
from collections.abc import Sequence
from typing import Any

from paco_judge.client import JudgeClient, JudgeError, Pair
from paco_judge.grid import pairs as index_pairs
from paco_judge.questions import EDIT_DIMENSIONS, editing_questions, pair_question, theme_question
from paco_judge.verdict import Verdict, editing_score
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image

TOP_LOGPROBS = 20  # as asked of servers: the same pairs have a score either way (method §1)
EXAMPLES = """\
examples:
  all pairs of some images, with the judge's reasons
    paco-reward score a.png b.png c.png --theme "one red fox in four seasons" --model path/to/judge --reasons
  base and adapter; or a running server
    paco-reward score a.png b.png --model Qwen/Qwen2.5-VL-7B-Instruct --adapter saves/paco_reward_lora
    paco-reward score a.png b.png --server http://127.0.0.1:8000
  edits of the first image
    paco-reward score photo.png edit1.png edit2.png --instruction "make the car blue" --model path/to/judge
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `score` to the command line."""
    parser = commands.add_parser(
        "score",
        help="score all pairs of some images, or edits of an image",
        description="P(Yes) of the judge for every pair of the images, and the mean. With --instruction: of edits of the "
        "first image, whether they follow the instruction, whether all else stayed, and the square root of the product.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="two or more image files or URLs")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--theme", help="theme sentence of the images; default: asked without a theme")
    asked.add_argument("--instruction", help="the images after the first are edits of it, made with this instruction")
    parser.add_argument("--reasons", action="store_true", help="print the judge's whole answers too")
    parser.add_argument("--reason_tokens", type=int, default=512, help="longest answer (default %(default)s)")
    parser.add_argument("--model", "--base", dest="model", help="model folder or hub name (served name with --server)")
    parser.add_argument("--adapter", help="adapter folder to put on the model")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per forward pass (default 32)")
    parser.add_argument("--server", metavar="URL", help="ask an OpenAI-compatible server instead of loading a model")
    parser.add_argument("--api_key_env", metavar="VARIABLE", help="environment variable that holds the server's key")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Ask and print; the exit status is 0 only if every pair has a score."""
    if len(args.images) < 2:
        raise PacoRewardError("a score compares images: name at least two")
    images = [open_image(source) for source in args.images]
    judge = _Server(args) if args.server else _Local(args)
    if args.instruction is not None:
        return _edits(args, images, judge)
    question = theme_question(args.theme) if args.theme else pair_question()
    indices = index_pairs(len(images))
    pairs = [Pair(images[i], images[j], question) for i, j in indices]
    verdicts = judge.score(pairs)
    reasons = judge.reasons(pairs) if args.reasons else [None] * len(pairs)
    width = max(map(len, args.images))
    for (i, j), verdict, reason in zip(indices, verdicts, reasons, strict=True):
        print(f"{args.images[i]:<{width}}  {args.images[j]:<{width}}  {_shown(verdict)}")
        if reason is not None:
            print(f"    {reason}")
    _refuse_missing(verdicts)
    print(f"{'mean':<{2 * width + 2}}  {sum(verdict.p_yes for verdict in verdicts) / len(verdicts):.4f}")
    return 0


def _edits(args: argparse.Namespace, images: list, judge: "_Local | _Server") -> int:
    if not args.instruction.strip():
        raise PacoRewardError("--instruction is empty; give the text that the edit was made with")
    questions = editing_questions(args.instruction)
    pairs = [Pair(images[0], edited, question) for edited in images[1:] for question in questions]
    verdicts = judge.score(pairs)
    reasons = judge.reasons(pairs) if args.reasons else []
    width = max(map(len, ["edit", *args.images[1:]]))
    print(f"{'edit':<{width}}  " + "  ".join(f"{name:>16}" for name in EDIT_DIMENSIONS))
    for number, name in enumerate(args.images[1:]):
        consistency, following = verdicts[2 * number : 2 * number + 2]
        overall = editing_score(consistency, following)
        cells = [_shown(following), _shown(consistency), "no score" if overall is None else f"{overall:.4f}"]
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>16}" for cell in cells))
        for asked, reason in zip(("consistency", "prompt_following"), reasons[2 * number : 2 * number + 2]):
            print(f"    {asked}: {reason}")
    _refuse_missing(verdicts)
    return 0


def _shown(verdict: Verdict) -> str:
    return f"{verdict.p_yes:.4f}" if verdict.ok else f"no score: {verdict.error}"


def _refuse_missing(verdicts: Sequence[Verdict]) -> None:
    missing = sum(not verdict.ok for verdict in verdicts)
    if missing:
        raise PacoRewardError(f"{missing} of {len(verdicts)} answers have no score, so there is no mean")


class _Local:
    """A judge in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        from paco_reward.scorer import JudgeScorer, quiet

        if not args.model:
            raise PacoRewardError(
                "name the judge: --model FOLDER or hub NAME, with --adapter FOLDER, or --server URL"
            )
        quiet()
        self._tokens = args.reason_tokens
        self._scorer = JudgeScorer.from_pretrained(args.model, args.adapter, batch_size=args.batch_size)

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        return self._scorer.score(pairs, top=TOP_LOGPROBS)

    def reasons(self, pairs: Sequence[Pair]) -> list[str]:
        return self._scorer.reasons(pairs, self._tokens)


class _Server:
    """A judge behind a server."""

    def __init__(self, args: argparse.Namespace) -> None:
        from paco_reward.keys import api_key
        from paco_reward.pairing.chat import Server

        if args.adapter:
            raise PacoRewardError("--adapter is for a model in this process; serve the adapter and name it with --model")
        key = api_key(args.api_key_env)
        client: dict[str, Any] = {"model": args.model} if args.model else {}
        self._client = JudgeClient(base_url=args.server, api_key=key, **client)
        self._tokens = args.reason_tokens
        self._server = Server(args.server, self._client.model, key)

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        try:
            return self._client.score_blocking(pairs)
        except JudgeError as error:
            raise PacoRewardError(str(error)) from error

    def reasons(self, pairs: Sequence[Pair]) -> list[str]:
        from paco_judge.images import png_data_url
        from paco_judge.questions import build_messages
        from paco_reward.pairing.chat import Question, ask_all

        def messages(pair: Pair) -> list[dict]:
            return build_messages(png_data_url(pair.image_a), png_data_url(pair.image_b), pair.question)

        answers: dict[str, str] = {}
        questions = [Question(str(number), lambda p=pair: messages(p)) for number, pair in enumerate(pairs)]
        refused = ask_all(self._server, questions, answers.__setitem__, "reasons", self._tokens)
        return [answers.get(question.key) or f"no answer: {refused.get(question.key)}" for question in questions]
