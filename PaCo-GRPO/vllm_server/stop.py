"""End the servers of one label (VLLM_LABEL, default "default") and no other process. Stopping twice is fine."""

import argparse
import os
import sys

from vllm_server.settings import LaunchError, label_from
from vllm_server.state import LabelFolder, end, runtime_root


def main() -> int:
    """Command line; the exit status."""
    argparse.ArgumentParser(prog="stop.sh", description=__doc__).parse_args()
    try:
        folder = LabelFolder(runtime_root(os.environ), label_from(os.environ))
        servers = folder.read()
        if not servers:
            print(f"Nothing runs with label {folder.label!r}.")
        were_alive = [server.alive() for server in servers]
        if left := end(servers):
            raise LaunchError(f"processes {[process.pid for process in left]} do not end, even when killed")
        for server, was_alive in zip(servers, were_alive, strict=True):
            print(f"{server.title} at {server.url}: {'ended' if was_alive else 'had already ended'}")
        folder.remove_ended()
    except LaunchError as error:
        print(f"stop: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
