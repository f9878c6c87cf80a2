"""Shows which servers run and whether they answer, and ends the servers of a label.

    python -m vllm_server.status [--json]
        exit status 0 when all are healthy, else 3; 1 after errors
    python -m vllm_server.status --stop
        ends the servers of VLLM_LABEL and no other process; twice is fine

A state is healthy, loading or stuck, other key (VLLM_API_KEY is not the one of the launch), or
ended.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict

from vllm_server.settings import LaunchError
from vllm_server.state import STATE, end_servers, label_folder, read_servers, runtime_root

_LINE = "{label:<16} {name:<24} {engine:<12} {url:<28} {pid:>8}  {state}"


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser.add_argument(
        "--stop", action="store_true", help="end the servers of VLLM_LABEL (default: default)"
    )
    arguments = parser.parse_args()
    try:
        return stop() if arguments.stop else status(arguments.json)
    except (LaunchError, OSError) as error:
        print(f"{'stop' if arguments.stop else 'status'}: {error}", file=sys.stderr)
        return 1


def status(as_json: bool) -> int:
    """Print a row for each server; returns the exit status.

    A label whose file is damaged hides no other label.
    """
    rows = []
    is_damaged = False
    for file in sorted(runtime_root(os.environ).glob(f"*/{STATE}")):
        try:
            servers = read_servers(file.parent)
        except LaunchError as error:
            print(f"status: {error}", file=sys.stderr)
            is_damaged = True
            continue
        for server in servers:
            state = server.state(os.environ.get("VLLM_API_KEY") or None)
            rows.append({"label": file.parent.name, "state": state} | asdict(server))
    if as_json:
        print(json.dumps(rows))
    elif rows:
        print("\n".join(_LINE.format(**row) for row in rows))
    else:
        print("No servers.")
    if is_damaged:
        return 1
    return 0 if all(row["state"] == "healthy" for row in rows) else 3


def stop() -> int:
    """End the servers of one label; returns the exit status."""
    folder = label_folder(os.environ)
    servers = read_servers(folder)
    ended = end_servers(folder, servers)
    for server in servers:
        result = "ended" if server in ended else "was not running"
        print(f"{server.name} at {server.url}: {result}")
    if not servers:
        print(f"No servers of {folder.name!r}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
