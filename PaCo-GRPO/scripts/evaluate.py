"""Evaluate adapters and benchmarks, or verify a checkpoint: ``paco_grpo/commands/evaluate.py``."""

import sys

from paco_grpo.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
