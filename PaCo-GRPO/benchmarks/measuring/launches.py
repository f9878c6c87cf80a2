"""Launches of epoch.py that take turns: for what cannot take turns within one process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

EPOCH = Path(__file__).resolve().parents[1] / "epoch.py"


class LaunchFailed(RuntimeError):
    """A launch ended with ``status``."""

    def __init__(self, key: Hashable, status: int) -> None:
        super().__init__(f"epoch.py with {key} ended with status {status}")
        self.status = status


def split_at_dashes(given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """A command line (None: this process's) before and after ``--``; what comes after is for epoch.py."""
    given = list(sys.argv[1:] if given is None else given)
    split = given.index("--") if "--" in given else len(given)
    return given[:split], given[split + 1 :]


def take_turns(
    keys: Sequence[Any],
    rounds: int,
    options: Sequence[str],
    launcher: Callable[[Any], tuple[Sequence[str], Mapping[str, str]]],
) -> dict[Any, list[dict]]:
    """Reports of epoch.py by key, one for each round; every second round goes backwards.

    Args:
        keys: What is compared.
        rounds: Launches of each.
        options: Of epoch.py.
        launcher: Key → command that runs a script with arguments, and its environment.

    Raises:
        LaunchFailed: One did.
    """
    found: dict[Any, list[dict]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as folder:
        output = Path(folder) / "epoch.json"
        for number in range(rounds):
            for key in list(found) if number % 2 == 0 else list(found)[::-1]:
                command, environment = launcher(key)
                print(f"{key}: epoch.py {' '.join(options)}", file=sys.stderr, flush=True)
                command = [*command, str(EPOCH), *options, "--output", str(output)]
                done = subprocess.run(command, env=dict(environment), check=False, stdout=sys.stderr)
                if done.returncode:
                    raise LaunchFailed(key, done.returncode)
                found[key].append(json.loads(output.read_text()))
                output.unlink()
    return found
