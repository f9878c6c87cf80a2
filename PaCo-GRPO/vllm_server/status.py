"""Shows which servers run and whether they answer, and ends the servers of a label.

    python -m vllm_server.status [--json]    exit status 0 when all are healthy, else 3; 1 after errors
    python -m vllm_server.status --stop      ends the servers of VLLM_LABEL and no other process; twice is fine

A state is healthy, loading or stuck, other key (VLLM_API_KEY is not the one of the launch), or ended.
"""

import argparse
import json
import os
import sys

from vllm_server.plan import LaunchError
from vllm_server.state import LabelFolder, all_labels, end, runtime_root


def status(as_json: bool) -> int:
    """Print a row for each server; the exit status."""
    rows, damaged = [], False
    for folder in all_labels(runtime_root(os.environ)):
        try:
            for server in folder.read():
                row = {"label": folder.label, "name": server.title, "model": server.model, "engine": server.engine}
                row |= {"url": server.url, "gpus": list(server.gpus), "pid": server.pid, "log": server.log}
                state = server.state(os.environ.get("VLLM_API_KEY") or None)
                rows.append(row | {"state": {"not answering": "loading or stuck"}.get(state, state)})
        except LaunchError as error:
            damaged = True
            print(f"status: label {folder.label!r}: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(rows))
    else:
        line = "{label:<16} {name:<24} {engine:<12} {url:<28} {pid:>8}  {state}"
        print("\n".join(line.format(**row) for row in rows) or "No servers.")
    return 1 if damaged else 0 if all(row["state"] == "healthy" for row in rows) else 3


def stop() -> int:
    """End the servers of one label; the exit status."""
    folder = LabelFolder.from_environment(os.environ)
    servers = folder.read()
    if not servers:
        print(f"Nothing runs with label {folder.label!r}.")
    were_alive = [server.alive() for server in servers]
    end(servers)
    if left := [server.pid for server in servers if server.alive()]:
        raise LaunchError(f"processes {left} do not end, even when killed")
    for server, was_alive in zip(servers, were_alive, strict=True):
        print(f"{server.title} at {server.url}: {'ended' if was_alive else 'had already ended'}")
    folder.remove_ended()
    return 0


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser.add_argument("--stop", action="store_true", help="end the servers of VLLM_LABEL (default: default)")
    arguments = parser.parse_args()
    try:
        return stop() if arguments.stop else status(arguments.json)
    except LaunchError as error:
        print(f"{'stop' if arguments.stop else 'status'}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
