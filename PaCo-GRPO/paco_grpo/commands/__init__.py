"""What the commands in scripts/ do once their arguments are read."""

import logging
import os
import sys


def start_logging(form: str = "%(message)s") -> bool:
    """Log to standard error, of other processes than the main one only warnings.

    Returns whether this is the main process.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns of a kernel for CPUs that is not installed and not needed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return is_main
