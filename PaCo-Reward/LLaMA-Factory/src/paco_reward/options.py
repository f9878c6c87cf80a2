"""Options that name a judge, shared by the commands."""

import argparse
from typing import Any

from paco_judge.errors import UserError
from paco_judge.judge import LONGEST_ANSWER, Judge
from paco_judge.questions import add_form_arguments, form_of

MAX_CONCURRENCY = 16  # requests in flight at a server that others may use too


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def add_judge_options(
    parser: argparse.ArgumentParser, model_help: str = "model folder or hub name"
) -> None:
    """Add the options that ``load_scorer`` reads."""
    parser.add_argument(
        "--model",
        "--base",
        dest="model",
        help=model_help,
    )
    parser.add_argument("--adapter", help="adapter folder for the model")
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=32,
        help="pairs per forward pass (default %(default)s)",
    )
    add_form_arguments(parser)


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``judge_of`` reads."""
    parser.add_argument(
        "--reason_tokens",
        type=positive,
        default=LONGEST_ANSWER,
        help="longest answer (default %(default)s)",
    )
    add_judge_options(
        parser,
        "model folder or hub name; with --server the served name (default: PaCo-Reward-7B, or the server's only model)",
    )
    text = "ask an OpenAI-compatible server instead of loading a model"
    parser.add_argument("--server", metavar="URL", help=text)


def load_scorer(args: argparse.Namespace) -> Any:
    """The ``JudgeScorer`` of --model and --adapter. Raises ValueError or OSError."""
    from paco_judge.scorer import JudgeScorer

    _prepare_loading(args)
    return JudgeScorer.from_pretrained(
        args.model, args.adapter, batch_size=args.batch_size, form=form_of(args)
    )


def judge_of(args: argparse.Namespace) -> Judge:
    """The judge that a command line names, loaded or on a server. Raises ValueError or OSError."""
    form = form_of(args)
    if not args.server:
        _prepare_loading(args)
        return Judge.from_pretrained(
            args.model, args.adapter, batch_size=args.batch_size, form=form
        )
    if args.adapter:
        raise UserError(
            "--adapter needs a local model: merge it with `paco-reward export`, serve the result, "
            "and name that with --model"
        )
    return Judge(
        args.server,
        args.model,
        max_concurrency=MAX_CONCURRENCY,
        form=form,
    )


def _prepare_loading(args: argparse.Namespace) -> None:
    if not args.model:
        raise UserError(
            "name the judge: --model FOLDER or hub NAME, with --adapter FOLDER, or --server URL"
        )
    silence_transformers()


def silence_transformers() -> None:
    """Turn off transformers' progress bars and warnings."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
