"""The options of `paco-reward build-dataset`: an ``argparse.Namespace``, checked before any file is read."""

import argparse
from pathlib import Path

from paco_judge.questions import EDITING, RequestForm, add_form_arguments, form_of
from paco_reward.errors import PacoRewardError
from paco_reward.server import Server, api_key

RANGES = {
    "candidates": (2, 100),
    "sets_per_prompt": (1, 10**6),
    "yes_ranks": (1, 99),
    "no_ranks": (1, 99),
    "min_gap": (0, 1),
    "duplicate_bits": (0, 64),
    "test_share": (0, 0.9),
    "reason_tokens": (16, 8192),
    "max_concurrency": (1, 10**6),
    "timeout": (1e-3, 1e9),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options, in groups."""
    group = parser.add_argument_group("inputs")
    folder, file = {"type": Path, "metavar": "FOLDER"}, {"type": Path, "metavar": "FILE"}
    text = "grid images: named in the metadata (image, file, images), or <idx>/*.png, <idx>.png, <idx>_*.png"
    group.add_argument("--grids", **folder, help=text)
    text = "images already cut: <idx>/<generation>/*.png in row-major order, or with --rankings also <idx>/*.png"
    group.add_argument("--sub_figures", **folder, help=text)
    text = "jsonl with prompt and idx; several lines may be generations of one prompt (PaCo-GRPO's eval_data.jsonl)"
    group.add_argument("--metadata", **file, help=text)
    text = "jsonl in ConsistencyRank's form: folder, ref_image, comp_images, rank_images (best first)"
    group.add_argument("--rankings", **file, help=text)
    text = "jsonl with source, edited, instruction; labels consistency and follows (Yes or No), else the server's"
    group.add_argument("--editing", **file, help=text)
    text = "jsonl: folder, images (two names, in the order the reason mentions them), reason (beginning with Yes or No)"
    group.add_argument("--reasons_file", **file, help=text)
    group.add_argument("--output", **folder, required=True, help="the data set's folder")
    group.add_argument("--sets_only", action="store_true", help="only cut, and write sets for people to rank")

    group = parser.add_argument_group("questions, in training data and to the server")
    text = (
        "shipped template or text file for pairs of sub-figures (default theme); of several, each pair is asked one, chosen "
        "by the seed (theme theme pair: a third without theme), and a server that ranks the first"
    )
    group.add_argument("--question", nargs="+", default=["theme"], metavar="NAME|FILE", help=text)
    text = "the same for edits: whether the rest is kept, and (if given) whether the instruction is followed"
    group.add_argument("--editing_question", nargs="+", default=list(EDITING), metavar="NAME|FILE", help=text)
    add_form_arguments(group)

    group = parser.add_argument_group("a model over an OpenAI-compatible server")
    group.add_argument("--server", metavar="URL", help="for example http://127.0.0.1:8000")
    group.add_argument("--model", default="PaCo-Reward-7B", help="served name (default %(default)s)")
    text = (
        "scores: P(Yes) of the judge's question for each candidate (needs log-probabilities; default); order: one "
        "question with all images, answered with an order (the model must accept --candidates + 1 images)"
    )
    group.add_argument("--rank_by", choices=("scores", "order"), default="scores", help=text)
    group.add_argument("--reasons", action="store_true", help="have the model write a reason for every pair")
    group.add_argument("--reason_model", metavar="NAME", help="served name of the model for reasons (default: --model)")
    group.add_argument("--reason_tokens", type=int, default=256, help="longest answer (default %(default)s)")
    group.add_argument("--api_key_env", metavar="VARIABLE", help="environment variable with the server's key")
    group.add_argument("--max_concurrency", type=int, default=16, help="requests in flight (default %(default)s)")
    group.add_argument("--timeout", type=float, default=300.0, help="seconds for one batch of answers (default 300)")

    group = parser.add_argument_group("how pairs are made")
    group.add_argument("--candidates", type=int, default=4, help="candidates of a set, at most (default 4)")
    group.add_argument("--sets_per_prompt", type=int, default=8, help="sets of a prompt, at most (default 8)")
    group.add_argument("--yes_ranks", type=int, default=1, help="this many of the best are Yes (default 1)")
    group.add_argument("--no_ranks", type=int, default=1, help="this many of the worst are No (default 1)")
    text = "smallest gap of P(Yes) between Yes and No, by scores (default %(default)s)"
    group.add_argument("--min_gap", type=float, default=0.1, help=text)
    text = (
        "images are near-duplicates if their perceptual hashes differ in at most this many of 64 bits and their colors "
        "agree (default %(default)s)"
    )
    group.add_argument("--duplicate_bits", type=int, default=4, help=text)
    text = "share of the themes that go to test, of those without a split in the metadata (default %(default)s)"
    group.add_argument("--test_share", type=float, default=0.05, help=text)
    text = "the same seed, inputs and answers give the same bytes (default %(default)s)"
    group.add_argument("--seed", type=int, default=42, help=text)
    text = "data sets are NAME_train and NAME_test, with reasons NAME_cot_train … (default %(default)s)"
    group.add_argument("--name", default="consistency_reward", help=text)
    group.add_argument("--editing_name", default="sharegpt_editing", help="the same for edits (default %(default)s)")


def server_of(options: argparse.Namespace) -> Server | None:
    """The server, if one is named.

    Raises:
        PacoRewardError: The variable of its key is not set.
    """
    if not options.server:
        return None
    key = api_key(options.api_key_env)
    return Server(options.server, options.model, key, options.max_concurrency, options.timeout, asked_form(options))


def asked_form(options: argparse.Namespace) -> RequestForm:
    """Image labels (also of the training data), image format and answer tokens (default here: variants)."""
    return form_of(options, answer_tokens="variants")


def check(options: argparse.Namespace) -> None:
    """Check values and combinations.

    Raises:
        PacoRewardError: Names the option and the remedy.
    """
    for name, (lowest, highest) in RANGES.items():
        if not lowest <= getattr(options, name) <= highest:
            raise PacoRewardError(f"--{name} must lie between {lowest} and {highest}, not {getattr(options, name)}")
    images, ranks = options.grids or options.sub_figures, options.yes_ranks + options.no_ranks
    for problem, message in (
        (options.grids and options.sub_figures, "--grids and --sub_figures exclude each other; give one"),
        (not images and not options.editing, "nothing to build from: give --grids, --sub_figures or --editing"),
        (images and not options.metadata, "--metadata is missing: the jsonl file with the images' prompts"),
        (
            not images and (options.rankings or options.sets_only or options.metadata),
            "--metadata, --rankings and --sets_only need the images: give --grids or --sub_figures",
        ),
        (
            images and not (options.rankings or options.server or options.sets_only),
            "labels come from rankings: give --rankings FILE (by people), --server URL (a model ranks) or --sets_only",
        ),
        (options.rankings and options.sets_only, "--sets_only writes sets to be ranked; omit --rankings"),
        (options.reasons and not options.server, "--reasons are written by a model: give --server URL"),
        (options.reasons_file and options.reasons, "--reasons_file and --reasons exclude each other; give one"),
        (
            options.reasons_file and (options.editing or not images),
            "--reasons_file holds reasons for pairs of sub-figures; build edits in a separate run",
        ),
        (options.name == options.editing_name, "--name and --editing_name must differ"),
        (
            images and not options.rankings and ranks > options.candidates,
            f"--yes_ranks and --no_ranks ({ranks} in all) exceed --candidates {options.candidates}",
        ),
    ):
        if problem:
            raise PacoRewardError(message)
