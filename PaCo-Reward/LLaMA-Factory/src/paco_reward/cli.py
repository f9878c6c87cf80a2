"""The `paco-reward` command: train, export, score, demo, rank, accuracy, build-dataset, …."""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from paco_judge.arguments import Parser
from paco_judge.errors import UserError, run_command
from paco_judge.files import read_json
from paco_judge.questions import EDITING, add_form_arguments, form_of
from paco_reward import demo, rank, score, suspects
from paco_reward.options import (
    add_judge_options,
    load_scorer,
    positive,
    silence_transformers,
)

BUILD_HELP = """Builds labeled pairs for training the judge: from your own pairs (--pairs), or from
generated images, which people (--rankings) or a judge (--server) rank (docs/judge.md, "Training
data"). The same command resumes a stopped run."""


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
    parser = Parser(prog="paco-reward", description=__doc__)
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

    text = "merge an adapter into its base model, and check that the scores stay the same"
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
        "--media_dir", help="folder that images are relative to, as in training; default: the same"
    )
    accuracy.add_argument(
        "--dataset",
        required=True,
        help="name in dataset_info.json; several, with commas, are also reported each",
    )
    accuracy.add_argument("--output", help="write the numbers as JSON to this file")
    accuracy.add_argument(
        "--before",
        type=Path,
        metavar="FILE",
        help="also print a table beside the numbers that an earlier --output has of another judge",
    )
    accuracy.set_defaults(command=_accuracy)

    score.add_parser(commands)
    demo.add_parser(commands)
    rank.add_parser(commands)
    suspects.add_parser(commands)
    _add_build_parser(commands)
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
    from paco_reward.metrics import comparison, measure

    before = read_json(args.before) if args.before else None
    if before is not None and before["dataset"] != args.dataset:
        raise UserError(f"{args.before} is of --dataset {before['dataset']}, not of {args.dataset}")
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    rows: list = []
    labels: list[bool] = []
    kinds: list[str] = []
    names = [name.strip() for name in args.dataset.split(",")]
    for name in dict.fromkeys(names):  # each once
        pairs, pair_labels = labeled_pairs(args.dataset_dir, name, form_of(args), args.media_dir)
        rows += pairs.rows
        labels += pair_labels
        kinds += [name] * len(pair_labels)
    report = {"model": args.model, "adapter": args.adapter, "dataset": args.dataset}
    report |= measure(load_scorer(args), FilePairs(rows), labels, kinds)
    text = json.dumps(report, indent=2)
    print(text, flush=True)
    if before is not None:
        print(comparison(before, report))
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    return 0 if report["missing"] == 0 else 1


def _add_build_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `build-dataset` to the command line."""
    text = "build training pairs from generated images, rankings and edits"
    parser = commands.add_parser("build-dataset", help=text, description=BUILD_HELP)
    parser.set_defaults(command=_build)
    folder = {"type": Path, "metavar": "FOLDER"}
    file = {"type": Path, "metavar": "FILE"}
    count = {"type": positive, "metavar": "N"}
    add = parser.add_argument
    add("--output", **folder, required=True, help="the data set's folder")
    add(
        "--pairs",
        **file,
        help="your own labeled pairs, .jsonl, .csv or .json: image1, image2, label (Yes or No) or "
        "score (0 to 1), and optional theme and reason",
    )
    add(
        "--mend",
        **file,
        help="labels of a judge's mistakes, as --pairs or --editing: written beside the --beside "
        "data sets of --output as NAME_mend_train, repeated to be a tenth of all. None is left out to "
        "balance them, and no new ones are for testing without --test_share",
    )
    add("--beside", metavar="NAMES", help="data sets in --output that are trained on with --mend")
    ranked = parser.add_mutually_exclusive_group()
    reasons = parser.add_mutually_exclusive_group()
    add("--grids", **folder, help="grid images: named in the metadata, <idx>/*, <idx>.png")
    add(
        "--metadata",
        **file,
        help="jsonl with prompt and idx; several lines may be generations of one prompt",
    )
    ranked.add_argument(
        "--rankings", **file, help="jsonl: folder, ref_image, comp_images, rank_images (best first)"
    )
    ranked.add_argument(
        "--sets_only", action="store_true", help="only cut, and write sets for people to rank"
    )
    add(
        "--editing",
        **file,
        help="jsonl with source, edited, instruction; labels consistency and follows (Yes or No). "
        "For a single question of your own, the label is Yes if all that a row states are",
    )
    reasons.add_argument(
        "--reasons_file", **file, help="jsonl: folder, images (two names), reason (Yes or No first)"
    )
    reasons.add_argument(
        "--reasons", action="store_true", help="the server's model writes a reason for every pair"
    )

    text = "an OpenAI-compatible server: http://127.0.0.1:8000"
    add("--server", metavar="URL", help=text)
    add("--model", help="served name (default: PaCo-Reward-7B, or the server's only model)")
    add(
        "--continue_unknown",
        action="store_true",
        help="also use earlier answers of which it is unknown whether this judge gave them, because "
        "its server does not say which weights it has",
    )
    template = "name of a question (questions.toml) or text file (default "
    add(
        "--question",
        metavar="NAME|FILE",
        help=template + "theme; pair for --pairs without a theme)",
    )
    add(
        "--editing_question",
        nargs="+",
        default=list(EDITING),
        metavar="NAME|FILE",
        help=f"{template}{' '.join(EDITING)})",
    )
    add_form_arguments(parser, answer_tokens="variants")

    add(
        "--candidates",
        **count,
        default=4,
        help="candidates of a set, at most (default %(default)s)",
    )
    add(
        "--sets_per_prompt",
        **count,
        default=8,
        help="sets of a prompt, at most (default %(default)s)",
    )
    add(
        "--yes_ranks",
        **count,
        default=1,
        help="this many of the best are Yes (default %(default)s)",
    )
    add(
        "--no_ranks", **count, default=1, help="this many of the worst are No (default %(default)s)"
    )
    add(
        "--min_gap",
        type=fraction,
        default=0.1,
        help="in a ranking: smallest difference of P(Yes) between the last Yes and the first No; for "
        "edits and the scores of --pairs: width of the range around 1/2 that is left out "
        "(default %(default)s)",
    )
    add(
        "--duplicate_bits",
        type=int,
        choices=range(65),
        metavar="N",
        default=4,
        help="of 64, in which near-duplicates differ (default %(default)s)",
    )
    add(
        "--test_share",
        type=fraction,
        help="share of the groups for testing (default 0.05; with --mend 0): pairs of a theme, or "
        "of --pairs and edits those with common images, stay together. Each question has "
        "at least one group with each answer, if half of those pairs stay in training; 0: no pairs "
        "for testing. What an earlier call decided stays: split.json",
    )
    add("--seed", type=int, default=42, help="decides every random choice (default %(default)s)")
    add(
        "--name",
        type=file_name,
        default="consistency_reward",
        help="of the data sets NAME_train, …; those of --editing are called sharegpt_editing_train, … "
        "(default %(default)s)",
    )


def check_build(options: argparse.Namespace) -> None:
    """Check what argparse does not, before anything is read or cut. Raises UserError."""
    inputs = [options.mend, options.pairs, options.grids or options.editing]
    if sum(map(bool, inputs)) > 1:
        raise UserError("--pairs and --mend make data sets of their own: run each alone")
    if not any(inputs):
        raise UserError("nothing to build from: give --pairs, --grids, --editing or --mend")
    if bool(options.mend) != bool(options.beside):
        raise UserError("--mend and --beside need each other")
    if options.mend and (options.reasons or options.server):
        raise UserError("--mend takes labels and reasons of its file only, and no --server")
    if options.test_share is None:
        options.test_share = 0.0 if options.mend else 0.05
    if bool(options.grids) != bool(options.metadata):
        raise UserError("--grids and --metadata need each other")
    if options.grids and not (options.rankings or options.server or options.sets_only):
        raise UserError(
            "labels: give --rankings FILE (people), --server URL (a judge), or --sets_only"
        )
    if options.reasons and not options.server:
        raise UserError("--reasons are written by a model: give --server URL")
    if not options.rankings and options.yes_ranks + options.no_ranks > options.candidates:
        raise UserError("--yes_ranks and --no_ranks exceed --candidates")


def fraction(text: str) -> float:
    """A number from 0, less than 1, for argparse."""
    if not 0 <= float(text) < 1:  # not true of NaN
        raise ValueError
    return float(text)


def file_name(text: str) -> str:
    """A name that files may begin with, for argparse; those with ``_cot`` hold reasons."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text) or text.endswith("_cot"):
        raise ValueError
    return text


def _build(args: argparse.Namespace) -> int:
    """Build, then print a summary; the exit status is 0 only if every question has an answer."""
    from paco_reward.pairing.build import build

    check_build(args)
    is_complete = True
    for name, stats in build(args).items():
        print(f"{name}:")
        for reason, count in stats["counts"].items():
            print(f"{count:>9}  {reason.replace('_', ' ')}")
            is_complete = is_complete and not reason.endswith("_without_answer")
        for dataset, numbers in stats["datasets"].items():
            print(f"{dataset}: " + "  ".join(f"{value} {key}" for key, value in numbers.items()))
    if args.sets_only:
        print(f"people rank them: paco-reward rank --sets {args.output} --output RANKED")
    else:
        print(f"written to {args.output}; stats.json holds these numbers")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
