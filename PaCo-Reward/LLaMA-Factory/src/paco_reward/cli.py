"""The `paco-reward` command: train, export, score, demo, accuracy, build-dataset."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from safetensors import SafetensorError

from paco_judge.client import JudgeError
from paco_reward import accuracy, demo, score
from paco_reward.errors import TRAINING_ERRORS, cleaning_up_on_sigterm, report_errors
from paco_reward.pairing import command as build_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; 1: the last line on standard error states the problem."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_reward").setLevel(logging.INFO)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    errors = (ValueError, OSError, SafetensorError, JudgeError)
    if args.command is _train:
        errors = TRAINING_ERRORS
    return report_errors(lambda: args.command(args), errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paco-reward", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    text = "train a judge with a LLaMA-Factory configuration"
    train = commands.add_parser("train", help=text, description=text)
    train.add_argument(
        "config", help="YAML configuration, for example config/paco_reward_lora.yaml"
    )
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that replace the configuration's"
    )
    train.set_defaults(command=_train)

    text = "merge an adapter into its base model, and see that the scores stay the same"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("--base", required=True, help="model folder or hub name")
    export.add_argument("--adapter", required=True, help="adapter folder that training wrote")
    export.add_argument("--output", required=True, help="new folder for the merged model")
    export.set_defaults(command=_export)

    score.add_parser(commands)
    demo.add_parser(commands)
    accuracy.add_parser(commands)
    build_command.add_parser(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    from paco_reward.launch import run

    with cleaning_up_on_sigterm():
        return run(args.config, args.overrides, dict(os.environ))


def _export(args: argparse.Namespace) -> int:
    from paco_judge.scorer import silence_transformers
    from paco_reward.export import export

    silence_transformers()
    with cleaning_up_on_sigterm():
        largest = export(args.base, args.adapter, args.output)
    print(f"merged model: {args.output}")
    print(f"largest score difference before/after on 100 pairs of images: {largest:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
