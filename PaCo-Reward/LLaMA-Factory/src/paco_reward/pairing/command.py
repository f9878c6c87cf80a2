"""`paco-reward build-dataset`: its options and its summary."""

import argparse
from pathlib import Path

from paco_judge.questions import EDITING, add_form_arguments
from paco_reward.errors import PacoRewardError
from paco_reward.score_command import positive

DESCRIPTION = """Builds training data for the judge from generated images. Grids are cut into sub-figures by the layout in their prompts;
a reference and candidates from different generations of a prompt make a set; people (--rankings) or a judge's P(Yes)
(--server) rank the candidates by consistency; the best become Yes pairs with the reference, the worst No pairs.
Near-duplicates are removed, train and test are split by theme, Yes and No are balanced. Answers are Yes or No, with
--reasons or --reasons_file also why. The same command resumes a stopped run and keeps every answer it already received.
"""

def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `build-dataset` to the command line."""
    parser = commands.add_parser(
        "build-dataset",
        help="build training pairs from generated images, rankings and edits",
        description=DESCRIPTION,
    )
    add_options(parser)
    parser.set_defaults(command=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``build``."""
    folder, file = {"type": Path, "metavar": "FOLDER"}, {"type": Path, "metavar": "FILE"}
    parser.add_argument("--output", **folder, required=True, help="the data set's folder")
    images = parser.add_mutually_exclusive_group()
    text = "grid images: named in the metadata (image, file, images), or <idx>/*.png, <idx>.png, <idx>_*.png"
    images.add_argument("--grids", **folder, help=text)
    text = "images already cut: <idx>/<generation>/*.png in row-major order, or with --rankings also <idx>/*.png"
    images.add_argument("--sub_figures", **folder, help=text)
    text = "jsonl with prompt and idx; several lines may be generations of one prompt (PaCo-GRPO's eval_data.jsonl)"
    parser.add_argument("--metadata", **file, help=text)
    ranked = parser.add_mutually_exclusive_group()
    text = "jsonl in ConsistencyRank's form: folder, ref_image, comp_images, rank_images (best first)"
    ranked.add_argument("--rankings", **file, help=text)
    ranked.add_argument("--sets_only", action="store_true", help="only cut, and write sets for people to rank")
    text = "jsonl with source, edited, instruction; labels consistency and follows (Yes or No), else the server's"
    parser.add_argument("--editing", **file, help=text)
    reasons = parser.add_mutually_exclusive_group()
    text = "jsonl: folder, images (two names, in the order the reason mentions them), reason (beginning with Yes or No)"
    reasons.add_argument("--reasons_file", **file, help=text)
    reasons.add_argument("--reasons", action="store_true", help="have the server's model write a reason for every pair")

    parser.add_argument("--server", metavar="URL", help="an OpenAI-compatible server: http://127.0.0.1:8000")
    parser.add_argument("--model", default="PaCo-Reward-7B", help="served name (default %(default)s)")
    parser.add_argument("--api_key_env", metavar="VARIABLE", help="environment variable with the server's key")
    text = "shipped template or text file for pairs of sub-figures (default %(default)s)"
    parser.add_argument("--question", default="theme", metavar="NAME|FILE", help=text)
    text = "the same for edits: whether the rest is kept, and (if given) whether the instruction is followed"
    parser.add_argument("--editing_question", nargs="+", default=list(EDITING), metavar="NAME|FILE", help=text)
    add_form_arguments(parser)

    parser.add_argument("--candidates", type=positive, default=4, help="candidates of a set, at most (default 4)")
    parser.add_argument("--sets_per_prompt", type=positive, default=8, help="sets of a prompt, at most (default 8)")
    parser.add_argument("--yes_ranks", type=positive, default=1, help="this many of the best are Yes (default 1)")
    parser.add_argument("--no_ranks", type=positive, default=1, help="this many of the worst are No (default 1)")
    text = "smallest gap of P(Yes) between Yes and No, of a judge's rankings (default %(default)s)"
    parser.add_argument("--min_gap", type=float, default=0.1, help=text)
    text = (
        "images are near-duplicates if their perceptual hashes differ in at most this many of 64 bits and their colors "
        "agree (default %(default)s)"
    )
    parser.add_argument("--duplicate_bits", type=int, default=4, help=text)
    text = "share of the themes that go to test, of those without a split in the metadata (default %(default)s)"
    parser.add_argument("--test_share", type=float, default=0.05, help=text)
    text = "the same seed, inputs and answers give the same bytes (default %(default)s)"
    parser.add_argument("--seed", type=int, default=42, help=text)
    text = "data sets are NAME_train and NAME_test, with reasons NAME_cot_train … (default %(default)s)"
    parser.add_argument("--name", default="consistency_reward", help=text)


def check(options: argparse.Namespace) -> None:
    """Check what argparse does not. Raises PacoRewardError, naming the option."""
    images, ranks = options.grids or options.sub_figures, options.yes_ranks + options.no_ranks
    labels = options.rankings or options.server or options.sets_only
    for problem, message in (
        (not images and not options.editing, "nothing to build from: give --grids, --sub_figures or --editing"),
        (bool(images) != bool(options.metadata), "images (--grids, --sub_figures) and their prompts (--metadata) go together"),
        (images and not labels, "labels come from --rankings FILE (people) or --server URL (a judge); or use --sets_only"),
        (options.reasons and not options.server, "--reasons are written by a model: give --server URL"),
        (options.reasons_file and options.editing, "--reasons_file has no reasons for edits; build them in a separate run"),
        (not 0 <= options.test_share < 1, "--test_share lies in [0, 1)"),
        (ranks > options.candidates, f"--yes_ranks and --no_ranks ({ranks}) exceed --candidates ({options.candidates})"),
    ):
        if problem:
            raise PacoRewardError(message)


def run(args: argparse.Namespace) -> int:
    """Build, then print a summary."""
    from paco_reward.pairing.build import build

    check(args)
    stats = build(args)
    for name, value in stats["counts"].items():
        print(f"{value:>9}  {name.replace('_', ' ')}")
    for name, numbers in stats["datasets"].items():
        print(f"{name}: " + "  ".join(f"{value} {key}" for key, value in numbers.items()))
    if args.sets_only:
        print(f"add rank_images (best first) to the lines of {args.output / 'sets.jsonl'}; pass the file to --rankings")
    else:
        print(f"written to {args.output}; stats.json holds these numbers")
    return 0
