"""What the commands in scripts/ do once their arguments are read."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from paco_grpo.names import did_you_mean
from paco_judge.arguments import Parser


def start_logging(form: str = "%(message)s") -> bool:
    """Log to standard error, of other processes than the main one only warnings, without bars.

    Returns whether this is the main process.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    if not is_main:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read by transformers, too
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns of a kernel for CPUs that is not installed and not needed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return is_main


def parse_beside_options(
    parser: Parser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of the command, and those that ``options.read_options`` reads."""
    command, others = parser.parse_known_args(arguments)
    for word in others:
        option = word.partition("=")[0]
        if option.startswith("--") and option.partition(".")[0] != "--config":
            parser.error(f"unknown option {option}.{did_you_mean(option, parser.option_strings())}")
    return command, others
