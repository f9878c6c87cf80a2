"""End the servers of one label (VLLM_LABEL, default "default"), and nothing else. Twice is fine."""

import argparse
import os
import sys
from collections.abc import Mapping

from vllm_server.servers import end_group
from vllm_server.settings import LaunchError, label_from
from vllm_server.state import LabelFolder, runtime_root


def stop(environment: Mapping[str, str]) -> int:
    """Returns an exit status: 0 when nothing of the label runs any more."""
    folder = LabelFolder(runtime_root(environment), label_from(environment))
    state = folder.read()
    if state is None:
        print(f"Nothing runs with label {folder.label!r}.")
        return 0
    were_alive = [server.leader.alive() for server in state.servers]
    left = end_group(list(state.servers))
    for server, was_alive in zip(state.servers, were_alive, strict=True):
        print(f"{server.title} on port {server.port}: {'ended' if was_alive else 'had ended already'}")
    if left:
        raise LaunchError(f"processes {[process.pid for process in left]} do not end, even when killed")
    folder.remove_ended()
    return 0


def main() -> int:
    argparse.ArgumentParser(prog="stop.sh", description=__doc__).parse_args()
    try:
        return stop(os.environ)
    except LaunchError as error:
        print(f"stop: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
