"""`paco-reward build-dataset`: options, and what is said at the end."""

import argparse
from dataclasses import fields
from pathlib import Path

from paco_reward.errors import PacoRewardError
from paco_reward.keys import api_key

DESCRIPTION = """\
Builds training data for the judge from generated images: pairs of sub-figures with Yes or No, and reasons.

  1  Each grid is cut into its sub-figures, by the layout in its prompt.
  2  A reference sub-figure and candidates from different generations of its prompt make a set.
  3  The candidates are ranked by how consistent they are with the reference: by people (--rankings) or by a model
     (--server).
  4  The best candidates of a ranking become Yes pairs with the reference, the worst No pairs (--yes_ranks, --no_ranks).
  5  Near-duplicates are removed, train and test are split by theme, and Yes and No are made equally many.
  6  With --reasons a model writes why; what contradicts its label is left out. Else answers are Yes or No alone.
"""
EXAMPLES = """\
examples:
  a model ranks, another question to it gives reasons
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --server http://127.0.0.1:8000 \\
        --model Qwen2.5-VL-72B-Instruct --reasons --output PaCo-Dataset
  people rank: first the sets to be ranked (sets.jsonl beside images/), then their rankings
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --sets_only --output PaCo-Dataset
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --rankings ranked.jsonl --output PaCo-Dataset
  and with reasons that people wrote
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --rankings ranked.jsonl \\
        --reasons_file reasons.jsonl --output PaCo-Dataset
  rankings of sub-figures that are cut already, in ConsistencyRank's form
    paco-reward build-dataset --sub_figures BENCH/images --metadata BENCH/prompt_data.jsonl \\
        --rankings BENCH/consistency_full_rank.jsonl --output PaCo-Dataset
  edits
    paco-reward build-dataset --editing edits.jsonl --output PaCo-Dataset

The same command given again continues a run that was killed, with every answer it already had. Train on the result with
    bash train/paco_reward.sh config/paco_reward_lora.yaml dataset_dir=PaCo-Dataset dataset=consistency_reward_cot_train \\
        eval_dataset=consistency_reward_cot_test
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `build-dataset` to the command line."""
    parser = commands.add_parser(
        "build-dataset",
        help="build training pairs from generated images, rankings and edits",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_inputs(parser.add_argument_group("what it is built from"))
    _add_server(parser.add_argument_group("a model over an OpenAI-compatible server"))
    _add_rule(parser.add_argument_group("how pairs are made"))
    parser.set_defaults(command=run)


def _add_inputs(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--grids",
        type=Path,
        metavar="FOLDER",
        help="grid images: named in the metadata (image, file or images), or <idx>/*.png, <idx>.png, <idx>_*.png",
    )
    group.add_argument(
        "--sub_figures",
        type=Path,
        metavar="FOLDER",
        help="images already cut: <idx>/<generation>/*.png in row-major order, or with --rankings also <idx>/*.png",
    )
    group.add_argument(
        "--metadata",
        type=Path,
        metavar="FILE",
        help="jsonl with prompt and idx; several lines may be generations of one prompt (PaCo-GRPO's eval_data.jsonl)",
    )
    group.add_argument(
        "--rankings",
        type=Path,
        metavar="FILE",
        help="jsonl in ConsistencyRank's form: folder, ref_image, comp_images, rank_images (best first)",
    )
    group.add_argument(
        "--editing",
        type=Path,
        metavar="FILE",
        help="jsonl with source, edited, instruction; labels consistency and follows (Yes or No), else the server's",
    )
    group.add_argument(
        "--reasons_file",
        type=Path,
        metavar="FILE",
        help="jsonl of written reasons: folder, images (two names, in the order that the reason speaks of), reason "
        "(beginning with Yes or No)",
    )
    group.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="the data set's folder")
    group.add_argument("--sets_only", action="store_true", help="only cut, and write sets for people to rank")


def _add_server(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--server", metavar="URL", help="for example http://127.0.0.1:8000")
    group.add_argument("--model", default="PaCo-Reward-7B", help="served name (default %(default)s)")
    group.add_argument(
        "--rank_by",
        choices=("scores", "order"),
        default="scores",
        help="scores: P(Yes) of the judge's question for each candidate (needs log-probabilities; default); "
        "order: one question with all images, answered with an order (the model must take --candidates + 1 images)",
    )
    group.add_argument("--reasons", action="store_true", help="have a reason written for every pair")
    group.add_argument("--reason_model", metavar="NAME", help="served name of the model for reasons (default: --model)")
    group.add_argument("--reason_tokens", type=int, default=256, help="longest answer (default %(default)s)")
    group.add_argument("--api_key_env", metavar="VARIABLE", help="environment variable that holds the server's key")
    group.add_argument("--max_concurrency", type=int, default=16, help="requests at a time (default %(default)s)")
    group.add_argument("--timeout", type=float, default=300.0, help="seconds for one batch of answers (default 300)")


def _add_rule(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--candidates", type=int, default=4, help="candidates of a set, at most (default 4)")
    group.add_argument("--sets_per_prompt", type=int, default=8, help="sets of a prompt, at most (default 8)")
    group.add_argument("--yes_ranks", type=int, default=1, help="so many of the best are Yes (default 1)")
    group.add_argument("--no_ranks", type=int, default=1, help="so many of the worst are No (default 1)")
    group.add_argument(
        "--min_gap", type=float, default=0.1, help="least gap of P(Yes) between Yes and No, by scores (default 0.1)"
    )
    group.add_argument(
        "--duplicate_bits",
        type=int,
        default=4,
        help="images whose perceptual hashes differ in at most so many of 64 bits, and whose colours agree, are "
        "near-duplicates (default 4)",
    )
    group.add_argument("--test_share", type=float, default=0.05, help="share of the themes kept for testing, of those whose metadata does not say split (0.05)")
    group.add_argument("--seed", type=int, default=42, help="the same seed, input and answers: the same bytes (42)")
    group.add_argument(
        "--name",
        default="consistency_reward",
        help="data sets are NAME_train and NAME_test, with reasons NAME_cot_train … (default %(default)s)",
    )
    group.add_argument("--editing_name", default="sharegpt_editing", help="the same for edits (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Build, then say what was built."""
    from paco_reward.pairing.build import build
    from paco_reward.pairing.chat import Server
    from paco_reward.pairing.options import Options
    from paco_reward.pairing.report import lines

    given = {field.name: getattr(args, field.name) for field in fields(Options) if field.name != "server"}
    server = None
    if args.server:
        if args.max_concurrency < 1 or args.timeout <= 0:
            raise PacoRewardError("--max_concurrency must be at least 1 and --timeout above 0")
        server = Server(args.server, args.model, api_key(args.api_key_env), args.max_concurrency, args.timeout)
    stats = build(Options(**given, server=server))
    print("\n".join(lines(stats)))
    if args.sets_only:
        print(
            f"to be ranked: {args.output / 'sets.jsonl'}, images in {args.output / 'images'}; add rank_images (best first) "
            "to its lines and give them back with --rankings"
        )
    else:
        print(f"written to {args.output}; samples.png shows some pairs, stats.json holds these numbers")
    return 0

