"""Make images with a trained adapter, at any resolution, with the same sampler as the evaluation.

python scripts/generate.py --config config/grpo.py:NAME [--config.a.b=value …] [OPTION …]
    --adapter DIR        a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it
                         out for the base model
    --prompt TEXT        what to draw; may be repeated
    --prompts_file FILE  more prompts: .txt, one a line, or rows with sizes and images: .jsonl such
                         as a *_metadata.jsonl, .json, .arrow, .parquet
    --image FILE         what to edit: once for all prompts, or for each prompt in their order
    --seeds 8            images of each prompt (seeds 0 to 7); or the seeds themselves: 0,1,5 (one: 5,)
    --judge URL          scores by the configuration's judge there, on the sheet and in scores.jsonl
    --best 1             keep only the best image of each prompt by its score (2: the best two, …)
    --output DIR         default: generated
Resolution, steps and batch size are config.test.{resolution,num_steps,batch_size}, sizes of a file
count as config.item_size says, texts are padded to config.max_sequence_length.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paco_grpo.commands import parse_beside_options, start_logging
from paco_judge.arguments import Parser
from paco_judge.errors import end_process, run_command

_MOST_SEEDS = 100_000  # seeds of an evaluation are larger


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(__doc__)
        return 0
    usage = "generate.py --config FILE[:NAME] [--config.a.b=value …] [OPTION …]; --help lists them"
    parser = Parser(add_help=False, usage=usage)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts_file", type=Path)
    parser.add_argument("--image", action="append", default=[], type=Path)
    parser.add_argument("--seeds", type=read_seeds, default=[0])
    parser.add_argument("--judge")
    parser.add_argument("--best", type=int)
    parser.add_argument("--output", type=Path, default=Path("generated"))
    command, configuration = parse_beside_options(parser, arguments)
    start_logging()

    # PyTorch and diffusers take seconds to import: --help and wrong arguments do not wait for them.
    from paco_grpo.commands.generate import generate
    from paco_grpo.options import read_options
    from paco_grpo.rewards.queue import ScoringError
    from paco_grpo.training.checks import require_promised_gpu

    def run() -> None:
        require_promised_gpu(os.environ)
        options, _ = read_options(configuration)
        kept = generate(options, command)
        print(f"{'1 image' if kept == 1 else f'{kept} images'} and sheet.png in {command.output}")

    return run_command(run, ScoringError, OSError)


def read_seeds(text: str) -> Sequence[int]:
    """``8`` is the seeds 0 to 7; ``0,1,5`` are these, and ``5,`` is one."""
    if "," in text:
        seeds: Sequence[int] = [int(word) for word in text.split(",") if word.strip()]
    else:
        seeds = range(min(int(text), 2**62))
    if not 1 <= len(seeds) <= _MOST_SEEDS:
        raise argparse.ArgumentTypeError(
            f"{text} images of each prompt are not 1 to {_MOST_SEEDS}; one seed is written {text},"
        )
    if min(seeds) < 0 or max(seeds) >= 2**63 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: seeds are different numbers from 0 to 2^63 - 1")
    return seeds


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
