"""Say which servers run, and whether they answer. Exit status 0 when all that should run are healthy."""

import argparse
import json
import os
import sys
from collections.abc import Mapping

from vllm_server.servers import serves
from vllm_server.settings import LaunchError
from vllm_server.state import all_labels, runtime_root


def status(environment: Mapping[str, str]) -> list[dict]:
    """One row for each process: label, name, model, engine, url, gpus, pid, log, state.

    ``state``: healthy, loading, not answering (alive, but it does not serve its models: it is stuck, or VLLM_API_KEY is
    not the launch's), or ended.
    """
    rows = []
    for folder in all_labels(runtime_root(environment)):
        group = folder.read()
        for server in group.servers if group else ():
            url = server.url
            if not server.leader.alive():
                state = "ended"
            elif serves(url, server.names, environment.get("VLLM_API_KEY") or None):
                state = "healthy"
            else:
                state = "not answering" if group.ready else "loading"
            row = {"label": folder.label, "name": server.title, "model": server.model, "engine": server.engine}
            rows.append(row | {"url": url, "gpus": list(server.gpus), "pid": server.leader.pid, "log": server.log, "state": state})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="status.sh", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    arguments = parser.parse_args()
    try:
        rows = status(os.environ)
    except LaunchError as error:
        print(f"status: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(rows))
    elif not rows:
        print("No servers.")
    for row in [] if arguments.json else rows:
        print(
            f"{row['label']:<16} {row['name']:<24} {row['engine']:<12} {row['url']:<28} {row['pid']:>8}  {row['state']}"
        )
    return 0 if all(row["state"] == "healthy" for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
