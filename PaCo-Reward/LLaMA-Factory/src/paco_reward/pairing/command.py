"""`paco-reward build-dataset`: its options and its summary."""

import argparse
import re
from pathlib import Path

from paco_judge.errors import UserError
from paco_judge.questions import EDITING, add_form_arguments
from paco_reward.options import add_server_options, positive

DESCRIPTION = """Builds labeled pairs for training the judge: from your own pairs (--pairs), or from
generated images, which people (--rankings) or a judge (--server) rank (docs/judge.md, "Training
data"). The same command resumes a stopped run."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `build-dataset` to the command line."""
    text = "build training pairs from generated images, rankings and edits"
    parser = commands.add_parser("build-dataset", help=text, description=DESCRIPTION)
    parser.set_defaults(command=run)
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
        help="jsonl with source, edited, instruction; labels consistency and follows (Yes or No)",
    )
    reasons.add_argument(
        "--reasons_file", **file, help="jsonl: folder, images (two names), reason (Yes or No first)"
    )
    reasons.add_argument(
        "--reasons", action="store_true", help="the server's model writes a reason for every pair"
    )

    add_server_options(parser, "an OpenAI-compatible server: http://127.0.0.1:8000")
    add("--model", default="PaCo-Reward-7B", help="served name (default %(default)s)")
    template = "shipped template or text file (default "
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
        help=template + "%(default)s)",
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
        help="smallest gap of P(Yes), or of --pairs' scores, between Yes and No "
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
        default=0.05,
        help="share of the themes that go to test, or of --pairs (default %(default)s)",
    )
    add("--seed", type=int, default=42, help="decides every random choice (default %(default)s)")
    add(
        "--name",
        type=file_name,
        default="consistency_reward",
        help="of the data sets NAME_train, …; those of --editing are called sharegpt_editing_train, … "
        "(default %(default)s)",
    )


def check(options: argparse.Namespace) -> None:
    """Check what argparse does not, before anything is read or cut. Raises UserError."""
    if options.pairs and (options.grids or options.editing):
        raise UserError("--pairs make data sets of their own: run them alone")
    if not (options.pairs or options.grids or options.editing):
        raise UserError("nothing to build from: give --pairs, --grids or --editing")
    if bool(options.grids) != bool(options.metadata):
        raise UserError("--grids need --metadata, and it them")
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


def run(args: argparse.Namespace) -> int:
    """Build, then print a summary; the exit status is 0 only if every question has an answer."""
    from paco_reward.pairing.build import build

    check(args)
    is_complete = True
    for name, stats in build(args).items():
        print(f"{name}:")
        for reason, count in stats["counts"].items():
            print(f"{count:>9}  {reason.replace('_', ' ')}")
            is_complete = is_complete and not reason.endswith("_without_answer")
        for dataset, numbers in stats["datasets"].items():
            print(f"{dataset}: " + "  ".join(f"{value} {key}" for key, value in numbers.items()))
    if args.sets_only:
        sets = args.output / "sets.jsonl"
        print(f"add rank_images (best first) to the lines of {sets}; pass the file to --rankings")
    else:
        print(f"written to {args.output}; stats.json holds these numbers")
    return 0 if is_complete else 1
