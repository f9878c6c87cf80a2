"""Evaluate adapters and benchmarks: ``paco_grpo/commands/evaluate.py``."""

import sys

from paco_grpo.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
