"""One trainer a run folder: the main process holds a lock on a file in it until the run ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Self

from paco_grpo.options import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"  # stays in the folder: removing it would let two trainers lock two files


class RunLock:
    """An exclusive lock on a run folder. The kernel releases it when the process ends, however it ends.

    Args:
        folder: An existing folder that can be written to.

    Raises:
        ConfigError: Another trainer holds it; the message names its process and host.
    """

    def __init__(self, folder: Path) -> None:
        try:
            handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"{folder / LOCK_FILE} cannot be opened ({error.strerror}); is it a link?") from error
        self.file = os.fdopen(handle, "a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            owner = self.file.read(200).strip()
            self.file.close()
            raise ConfigError(
                f"{folder} is in use by another trainer ({owner or 'just started'}): wait for it or end it, or choose "
                "another --config.run_name"
            ) from None
        except OSError as error:  # a network file system without locks
            logger.warning(
                "%s cannot be locked (%s): make sure that no second trainer uses this folder", folder, error.strerror
            )
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others have the folder. A second call does nothing."""
        if not self.file.closed:
            with contextlib.suppress(OSError):  # no locks here
                fcntl.flock(self.file, fcntl.LOCK_UN)  # closing alone keeps the lock where a forked child has the file
            self.file.close()


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
