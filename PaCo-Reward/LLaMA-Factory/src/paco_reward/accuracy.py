"""`paco-reward accuracy`: a judge's accuracy, AUC and calibration on labeled pairs."""

import argparse
import json
from pathlib import Path

from paco_judge.questions import form_of
from paco_reward.options import add_judge_options, load_scorer
from paco_reward.output import check_writable


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `accuracy` to the command line."""
    text = "accuracy, AUC and calibration on labeled pairs"
    parser = commands.add_parser("accuracy", help=text, description=text)
    add_judge_options(parser)
    parser.add_argument("--dataset_dir", required=True, help="folder with dataset_info.json")
    parser.add_argument(
        "--dataset",
        required=True,
        help="name in dataset_info.json; several, with commas, are also reported each",
    )
    parser.add_argument("--output", help="write the numbers as JSON to this file")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit status is 0 only if every pair has a score."""
    from paco_reward.datasets import FilePairs, labeled_pairs
    from paco_reward.metrics import measure

    if args.output:
        check_writable(Path(args.output))
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
    print(text, flush=True)  # first: the disk may be full by now
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    return 0 if report["missing"] == 0 else 1
