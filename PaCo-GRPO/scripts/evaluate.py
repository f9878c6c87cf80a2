"""Evaluate adapters and benchmarks: ``paco_grpo/commands/evaluate.py``."""

import sys

from paco_grpo.commands.evaluate import main
from paco_judge.errors import end_process

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
