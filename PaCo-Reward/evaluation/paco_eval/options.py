"""Command lines of the benchmarks."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from paco_eval.results import first_line
from paco_judge.client import DEFAULT_MODEL
from paco_judge.questions import add_form_arguments

HUB_MODEL = f"X-GenGroup/{DEFAULT_MODEL}"
EPILOG = """\
The same command continues a run that was stopped. An item that cannot be scored is reported and
left out. Exit status: 0 all items have a result, 1 some have none, 2 the run could not continue,
130 stopped by Ctrl-C."""


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """The parser of a command with this ``--help``."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """A benchmark's command line, with the options of its judge."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        "--backbone",
        help="folder, hub name, or served name with --server; default: the published "
        "PaCo-Reward-7B",
    )
    parser.add_argument("--adapter", help="adapter folder (engine transformers)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs (engine vllm)")
    parser.add_argument(
        "--gpu_memory_utilization", type=float, default=0.85, help="share of each GPU (engine vllm)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=8, help="pairs given to the engine at once"
    )
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), default="vllm", help="default: vllm"
    )
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument(
        "--port",
        dest="server",
        metavar="PORT",
        type="http://127.0.0.1:{}".format,
        help="on this machine",
    )
    parser.add_argument("--results_dir", "--result_dir", default="results")
    add_form_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    if args.batch_size < 1:
        parser.error(f"--batch_size must be at least 1, not {args.batch_size}")
    if args.model is None:
        args.model = DEFAULT_MODEL if args.server else HUB_MODEL
    return args


def exit_status(run: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int:
    """The exit status of a command whose ``run`` returns the number of items without a result."""
    try:
        return 1 if run(args) else 0
    except KeyboardInterrupt:
        print("stopped; run the same command to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
