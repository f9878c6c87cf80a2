"""The `paco-reward` command: train, export, score, demo, accuracy, build-dataset."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from paco_judge.errors import run_command
from paco_judge.questions import form_of
from paco_reward import demo, score
from paco_reward.options import add_judge_options, load_scorer, silence_transformers
from paco_reward.pairing import command as build_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; 1: the last line on standard error states the problem."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_reward").setLevel(logging.INFO)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    # It warns of a kernel for CPUs that is not installed and not needed.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    errors = (OSError, SafetensorError)
    if args.command is not _train:  # where a ValueError comes from inside LLaMA-Factory
        errors += (ValueError,)
    return run_command(lambda: args.command(args), *errors)


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

    text = "accuracy, AUC and calibration on labeled pairs"
    accuracy = commands.add_parser("accuracy", help=text, description=text)
    add_judge_options(accuracy)
    accuracy.add_argument("--dataset_dir", required=True, help="folder with dataset_info.json")
    accuracy.add_argument(
        "--dataset",
        required=True,
        help="name in dataset_info.json; several, with commas, are also reported each",
    )
    accuracy.add_argument("--output", help="write the numbers as JSON to this file")
    accuracy.set_defaults(command=_accuracy)

    score.add_parser(commands)
    demo.add_parser(commands)
    build_command.add_parser(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    from paco_reward.launch import run

    return run(args.config, args.overrides, dict(os.environ))


def _export(args: argparse.Namespace) -> int:
    from paco_reward.export import export

    silence_transformers()
    largest = export(args.base, args.adapter, args.output)
    print(f"merged model: {args.output}")
    print(f"largest score difference before/after on 100 pairs of images: {largest:.2e}")
    return 0


def _accuracy(args: argparse.Namespace) -> int:
    """Measure and print; the exit status is 0 only if every pair has a score."""
    from paco_reward.datasets import FilePairs, labeled_pairs
    from paco_reward.metrics import measure

    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    rows: list = []
    labels: list[bool] = []
    kinds: list[str] = []
    names = [name.strip() for name in args.dataset.split(",")]
    for name in dict.fromkeys(names):  # each once
        pairs, pair_labels = labeled_pairs(args.dataset_dir, name, form_of(args))
        rows += pairs.rows
        labels += pair_labels
        kinds += [name] * len(pair_labels)
    report = {"model": args.model, "adapter": args.adapter, "dataset": args.dataset}
    report |= measure(load_scorer(args), FilePairs(rows), labels, kinds)
    text = json.dumps(report, indent=2)
    print(text, flush=True)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    return 0 if report["missing"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
