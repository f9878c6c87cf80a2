"""One trainer a run folder: the main process holds a lock on a file in it until the run ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from paco_grpo.options import ConfigError

LOCK_FILE = ".lock"


def lock_folder(folder: Path) -> FileLock:
    """An exclusive lock on an existing run folder, held until its ``release()`` or the end of the process.

    Raises:
        ConfigError: Another trainer holds it, or the lock file is a link: it would be written through.
    """
    lock = FileLock(folder / LOCK_FILE)
    if (folder / LOCK_FILE).is_symlink():
        raise ConfigError(f"{folder / LOCK_FILE} is a link; remove it")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"{folder} is in use by another trainer: wait for it or end it, or choose another --config.run_name"
        ) from None
    return lock


def claim_folder(parent: Path, name: str) -> str:
    """Make a new folder ``name``, ``name-2``, … in ``parent`` that no other trainer has; returns its name."""
    claimed, number = name, 1
    while True:
        try:
            (parent / claimed).mkdir(parents=True)
            return claimed
        except FileExistsError:
            number += 1
            claimed = f"{name}-{number}"
