"""The one error of this package that the command line shows without a traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PacoRewardError(RuntimeError):
    """Something the user can repair; the message names the thing and the remedy."""


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """A ValueError of paco_judge (bad images, texts, weights, keys) becomes a PacoRewardError."""
    try:
        yield
    except ValueError as error:
        raise PacoRewardError(f"{prefix}{error}") from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Errors while ``file`` is written become PacoRewardError; a full disk is called that."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full: {file} cannot be written; free some space and run the same command again"
            raise PacoRewardError(message) from error
        raise PacoRewardError(f"{file} cannot be written: {error.strerror or error}") from error
