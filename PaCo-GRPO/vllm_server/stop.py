"""End the servers of one label (VLLM_LABEL, default "default") and no other process. Stopping twice is fine."""

import argparse
import os
import sys
from collections.abc import Mapping

from vllm_server.settings import LaunchError, label_from
from vllm_server.state import LabelFolder, end_servers, runtime_root


def stop(environment: Mapping[str, str]) -> None:
    """Raises LaunchError when a process cannot be ended."""
    folder = LabelFolder(runtime_root(environment), label_from(environment))
    group = folder.read()
    if group is None:
        print(f"Nothing runs with label {folder.label!r}.")
        return
    were_alive = [server.leader.alive() for server in group.servers]
    left = end_servers(group.servers)
    for server, was_alive in zip(group.servers, were_alive, strict=True):
        print(f"{server.title} on port {server.port}: {'ended' if was_alive else 'had already ended'}")
    if left:
        raise LaunchError(f"processes {[process.pid for process in left]} do not end, even when killed")
    folder.remove_ended()


def main() -> int:
    """Command line; the exit status."""
    argparse.ArgumentParser(prog="stop.sh", description=__doc__).parse_args()
    try:
        stop(os.environ)
    except LaunchError as error:
        print(f"stop: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
