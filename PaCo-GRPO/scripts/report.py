"""Write a page about a run: ``paco_grpo/report.py``."""

import sys

from paco_grpo.report import main

if __name__ == "__main__":
    sys.exit(main())
