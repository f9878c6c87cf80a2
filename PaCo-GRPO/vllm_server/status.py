"""Show which servers run and whether they answer. Exit status 0 when all are healthy, else 3; 1 after errors."""

import argparse
import json
import os
import sys
from collections.abc import Mapping

from vllm_server.settings import LaunchError
from vllm_server.state import all_labels, runtime_root


def status(environment: Mapping[str, str]) -> tuple[list[dict], list[str]]:
    """One row per process, and what is wrong with labels whose state cannot be read.

    ``state``: healthy, loading, not answering (it runs but does not serve its models: it is stuck, or VLLM_API_KEY is
    not the one of the launch), or ended.
    """
    rows, errors = [], []
    for folder in all_labels(runtime_root(environment)):
        try:
            group = folder.read()
        except LaunchError as error:
            errors.append(f"label {folder.label!r}: {error}")
            continue
        for server in group.servers if group else ():
            if not server.leader.alive():
                state = "ended"
            elif server.answers(environment.get("VLLM_API_KEY") or None):
                state = "healthy"
            else:
                state = "not answering" if group.ready else "loading"
            row = {"label": folder.label, "name": server.title, "model": server.model, "engine": server.engine}
            row |= {"url": server.url, "gpus": list(server.gpus), "pid": server.leader.pid, "log": server.log}
            rows.append(row | {"state": state})
    return rows, errors


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="status.sh", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    arguments = parser.parse_args()
    try:
        rows, errors = status(os.environ)
    except LaunchError as error:
        rows, errors = [], [str(error)]
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
