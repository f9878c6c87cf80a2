"""The `paco-reward` command: train, export, score, accuracy, build-dataset."""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paco_reward import __version__
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.command import add_parser as add_build_dataset
from paco_reward.score_command import add_parser as add_score


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (1: one line on standard error says what and how to repair it)."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_reward").setLevel(logging.INFO)
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except PacoRewardError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paco-reward", description=__doc__)
    parser.add_argument("--version", action="version", version=f"paco-reward {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a judge with a LLaMA-Factory configuration")
    train.add_argument("config", help="YAML configuration, for example config/paco_reward_lora.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the configuration's")
    train.set_defaults(command=_train)

    export = commands.add_parser("export", help="merge an adapter into its base")
    export.add_argument("--base", required=True, help="model folder or hub name")
    export.add_argument("--adapter", required=True, help="adapter folder that training wrote")
    export.add_argument("--output", required=True, help="folder for the merged model")
    export.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    export.add_argument("--dataset_dir", help="take the pairs of the comparison from this folder's --dataset")
    export.add_argument("--dataset")
    export.add_argument("--force", action="store_true", help="replace an output folder that is not empty")
    export.set_defaults(command=_export)

    add_score(commands)
    accuracy = commands.add_parser("accuracy", help="accuracy, AUC and calibration on labelled pairs")
    _add_judge(accuracy)
    accuracy.add_argument("--dataset_dir", required=True, help="folder with dataset_info.json")
    accuracy.add_argument("--dataset", required=True, help="name in dataset_info.json")
    accuracy.add_argument("--output", help="write the numbers as JSON to this file")
    accuracy.add_argument("--max_samples", type=int, help="only the first pairs")
    accuracy.set_defaults(command=_accuracy)
    add_build_dataset(commands)
    return parser


def _add_judge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--base", dest="model", help="model folder or hub name (served name with --server)")
    parser.add_argument("--adapter", help="adapter folder to put on the model")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per forward pass (default 32)")


def _train(args: argparse.Namespace) -> int:
    from paco_reward.launch import run

    return run(args.config, args.overrides, dict(os.environ))


def _export(args: argparse.Namespace) -> int:
    from paco_reward.accuracy import labelled_pairs
    from paco_reward.export import export, largest_difference, synthetic_pairs
    from paco_reward.scorer import JudgeScorer, quiet

    if bool(args.dataset_dir) != bool(args.dataset):
        raise PacoRewardError("--dataset_dir and --dataset go together")
    quiet()
    pairs = labelled_pairs(args.dataset_dir, args.dataset, 100)[0] if args.dataset else synthetic_pairs()
    output = export(args.base, args.adapter, args.output, dtype=args.dtype, force=args.force)
    before = JudgeScorer.from_pretrained(args.base, args.adapter)
    after = JudgeScorer.from_pretrained(output)
    print(f"merged model: {output}")
    print(
        f"largest score difference before/after on {len(pairs)} pairs: {largest_difference(before, after, pairs):.2e}"
    )
    return 0


def _load(args: argparse.Namespace):
    from paco_reward.scorer import JudgeScorer, quiet

    if not args.model:
        raise PacoRewardError("name the judge: --model FOLDER or hub NAME, with --adapter FOLDER")
    quiet()
    return JudgeScorer.from_pretrained(args.model, args.adapter, batch_size=args.batch_size)


def _accuracy(args: argparse.Namespace) -> int:
    from paco_reward.accuracy import labelled_pairs, measure

    pairs, labels = labelled_pairs(args.dataset_dir, args.dataset, args.max_samples)
    report = {"model": args.model, "adapter": args.adapter, "dataset": args.dataset}
    report |= measure(_load(args), pairs, labels)
    # JSON has no NaN: what could not be computed is null.
    report = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in report.items()}
    text = json.dumps(report, indent=2)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["missing"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
