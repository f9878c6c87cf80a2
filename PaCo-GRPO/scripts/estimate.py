"""Does a configuration fit on a GPU? The program is ``paco_grpo/estimate/report.py``."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it

from paco_grpo.estimate.report import main

if __name__ == "__main__":
    sys.exit(main())
