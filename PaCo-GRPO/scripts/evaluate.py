"""Evaluate an adapter or the base model as training does, or on benchmarks; compare two adapters.

python scripts/evaluate.py --config config/grpo.py:NAME [--config.a.b=value …] [OPTION …]
    --adapter DIR   a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for
                    the base model
    --against DIR   another adapter, or `base`: same prompts and seeds, differences paired by prompt
    --benchmarks t2is,gedit[=FOLDER]
                    instead of the configuration's test set and rewards. t2is: consistency_score,
                    subfig_clipT and pickscore on T2IS prompts. gedit: the editing questions on
                    GEdit-Bench's edits. dataset/fetch.py makes the sets, the judge is the
                    configuration's (vllm_server/launch.sh)
    --images_per_prompt K
                    at least 4: also w, b and w − b (docs/rewards.md), from K noises for each prompt
    --output DIR    images, scores (eval_data.jsonl), sheet.png, results.md, results.json; of the
                    other adapter in DIR/against
    --continue_unknown
                    also take images and scores of which it is unknown whether they are of the same
                    weights: the judge's server does not say which it has
The same command continues where it stopped: images that are there are kept, and what is complete is
not scored again. Another model, adapter or prompt set is refused, other rewards score again.
On all visible GPUs: bash scripts/launch.sh scripts/evaluate.py --config …
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paco_grpo.commands import parse_beside_options, start_logging
from paco_judge.arguments import Parser
from paco_judge.errors import end_process, run_command


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status: 0 done, 1 refused or failed."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        print(__doc__)
        return 0
    usage = "evaluate.py --config FILE[:NAME] [--config.a.b=value …] [OPTION …]; --help lists them"
    parser = Parser(add_help=False, usage=usage)
    parser.add_argument("--adapter")
    parser.add_argument("--against")
    parser.add_argument("--benchmarks", default="")
    parser.add_argument("--images_per_prompt", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("evaluation"))
    parser.add_argument("--continue_unknown", action="store_true")
    command, configuration = parse_beside_options(parser, arguments)
    is_main = start_logging()

    # PyTorch and diffusers take seconds to import: --help and wrong arguments do not wait for them.
    from paco_grpo.commands.evaluate import compare_adapters
    from paco_grpo.options import read_options
    from paco_grpo.rewards.queue import ScoringError
    from paco_grpo.training.checks import require_promised_gpu

    def run() -> None:
        require_promised_gpu(os.environ)
        options, _ = read_options(configuration)
        tables = compare_adapters(options, command)
        if is_main:
            print(f"{tables}images, scores and sheets are in {command.output}")

    return run_command(run, ScoringError, OSError)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
