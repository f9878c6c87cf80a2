"""Reads options and does nothing else: ``python -m paco_grpo.options.check --config FILE:NAME …``.

Exit status 0, or 2 with one message.
"""

import sys

from paco_grpo.options import ConfigError, read_options


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    try:
        read_options(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
