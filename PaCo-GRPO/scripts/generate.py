"""Make images with a trained adapter, at any resolution, with the same sampler as the evaluation.

python scripts/generate.py --config config/grpo.py:NAME [--config.a.b=value …] [OPTION …]
    --adapter DIR        a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it
                         out for the base model
    --prompt TEXT        what to draw; may be repeated
    --prompts-file FILE  one prompt a line, or a *_metadata.jsonl (its images are relative to its
                         folder)
    --image FILE         what to edit: once for all prompts, or for each --prompt in their order
    --seeds 8            images of each prompt (seeds 0 to 7); or the seeds themselves: 0,1,5
    --judge URL          scores by the configuration's judge there, on the sheet and in scores.jsonl
    --best 1             keep only the best image of each prompt by its score (2: the best two, …)
    --overwrite          write over images of an earlier command in the same folder
    --panels             also write each panel of a grid as its command file
    --output DIR         default: generated
Resolution, steps and batch size are config.test.{resolution,num_steps,batch_size}.
"""

import argparse
import logging
import sys
from pathlib import Path

MOST_SEEDS = 100_000


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done, 2 refused or failed with one message."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(__doc__)
        return 0
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts-file", type=Path)
    parser.add_argument("--image", action="append", default=[], type=Path)
    parser.add_argument("--seeds", type=read_seeds, default=[0])
    parser.add_argument("--judge")
    parser.add_argument("--best", type=int)
    parser.add_argument("--panels", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("generated"))
    command, rest = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    # PyTorch and diffusers take seconds to import: --help and wrong arguments do not wait for them.
    from paco_grpo.commands.generate import generate, prepare, read_items
    from paco_grpo.evaluation.evaluate import EvaluationImage
    from paco_grpo.options import read_options
    from paco_grpo.training.build import USER_ERRORS

    try:
        options, _ = read_options(rest)
        items = read_items(command.prompt, command.prompts_file, command.image)
        options, policy, judge = prepare(options, command, items)
        images = [EvaluationImage(item, seed) for item in items for seed in command.seeds]
        kept = generate(options, images, policy, judge, command)
    except (*USER_ERRORS, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{kept} images and sheet.png in {command.output}")
    return 0


def read_seeds(text: str) -> list[int]:
    """``8`` is the seeds 0 to 7; ``0,1,5`` are these."""
    if "," in text:
        seeds = [int(seed) for seed in text.split(",") if seed]
    elif int(text) <= MOST_SEEDS:
        seeds = list(range(int(text)))
    else:
        raise argparse.ArgumentTypeError(f"{text} images of each prompt are more than {MOST_SEEDS}")
    if not seeds or not all(0 <= seed < 2**63 for seed in seeds):
        raise argparse.ArgumentTypeError(f"{text}: seeds are whole numbers from 0 to 2^63 - 1")
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
