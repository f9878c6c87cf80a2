"""Write a page about runs: ``paco_grpo/report``."""

import sys

from paco_grpo.report.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
