"""`paco-reward build-dataset`: the command and its summary."""

import argparse

from paco_reward.errors import user_errors
from paco_reward.pairing.options import add_options

DESCRIPTION = """\
Builds training data for the judge from generated images. Grids are cut into sub-figures by the layout in their prompts;
a reference and candidates from different generations of a prompt make a set; people (--rankings) or a model (--server)
rank the candidates by consistency; the best become Yes pairs with the reference, the worst No pairs. Near-duplicates are
removed, train and test are split by theme, Yes and No are balanced. Answers are Yes or No, with --reasons also why.
"""
EXAMPLES = """\
examples:
  a model ranks and writes reasons
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --server http://127.0.0.1:8000 \\
        --model Qwen2.5-VL-72B-Instruct --reasons --output PaCo-Dataset
  people rank: first the sets to be ranked (sets.jsonl next to images/), then their rankings
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --sets_only --output PaCo-Dataset
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --rankings ranked.jsonl --output PaCo-Dataset
  and with human-written reasons
    paco-reward build-dataset --grids grids --metadata prompts.jsonl --rankings ranked.jsonl \\
        --reasons_file reasons.jsonl --output PaCo-Dataset
  rankings of sub-figures that are already cut, in ConsistencyRank's form
    paco-reward build-dataset --sub_figures BENCH/images --metadata BENCH/prompt_data.jsonl \\
        --rankings BENCH/consistency_full_rank.jsonl --output PaCo-Dataset
  edits
    paco-reward build-dataset --editing edits.jsonl --output PaCo-Dataset

The same command resumes a killed run and keeps every answer it already received. Train on the result with
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
    add_options(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Build, then print a summary."""
    from paco_reward.pairing.build import build

    with user_errors():  # unreadable images
        stats = build(args)
    for name, value in stats["counts"].items():
        print(f"{value:>9}  {name.replace('_', ' ')}")
    for name, numbers in stats["datasets"].items():
        print(f"{name}: " + "  ".join(f"{value} {key}" for key, value in numbers.items()))
    if args.sets_only:
        print(
            f"to be ranked: {args.output / 'sets.jsonl'}, images in {args.output / 'images'}; add rank_images (best first) "
            "to its lines and pass the file to --rankings"
        )
    else:
        print(f"written to {args.output}; stats.json holds these numbers")
    return 0
