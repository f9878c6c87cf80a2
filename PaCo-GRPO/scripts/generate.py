"""Make images with a trained adapter: ``paco_grpo/commands/generate.py``."""

import sys

from paco_grpo.commands.generate import main
from paco_judge.errors import end_process

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
