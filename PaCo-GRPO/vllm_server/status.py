"""Show which servers run and whether they answer. Exit status 0 when all are healthy, else 3; 1 after errors.

A state is healthy, loading or stuck, other key (VLLM_API_KEY is not the one of the launch), or ended.
"""

import argparse
import json
import os
import sys

from vllm_server.settings import LaunchError
from vllm_server.state import all_labels, runtime_root


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="status.sh", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    arguments = parser.parse_args()
    rows, errors = [], []
    try:
        folders = all_labels(runtime_root(os.environ))
    except LaunchError as error:
        folders, errors = [], [str(error)]
    for folder in folders:
        try:
            for server in folder.read():
                row = {"label": folder.label, "name": server.title, "model": server.model, "engine": server.engine}
                row |= {"url": server.url, "gpus": list(server.gpus), "pid": server.pid, "log": server.log}
                state = server.state(os.environ.get("VLLM_API_KEY") or None)
                rows.append(row | {"state": {"not answering": "loading or stuck"}.get(state, state)})
        except LaunchError as error:
            errors.append(f"label {folder.label!r}: {error}")
    for error in errors:
        print(f"status: {error}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(rows))
    elif rows or not errors:
        print("\n".join("{label:<16} {name:<24} {engine:<12} {url:<28} {pid:>8}  {state}".format(**row) for row in rows)
              or "No servers.")  # fmt: skip
    if errors:
        return 1
    return 0 if all(row["state"] == "healthy" for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
