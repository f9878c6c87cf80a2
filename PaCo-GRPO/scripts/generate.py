"""Make images with a trained adapter: ``paco_grpo/commands/generate.py``."""

import sys

from paco_grpo.commands.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
