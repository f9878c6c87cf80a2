"""Files that are whole or not there, whatever ends the process.

Any package may import this; it imports nothing of ours.
"""

import errno
import os
import re
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable (it may be immutable: lsattr)",
    errno.EROFS: "its file system is read-only: mount it for writing",
    errno.ENOENT: "it was removed or renamed: put it back",
    errno.ENOTDIR: "a file is in the place of a folder: remove it",
    errno.EISDIR: "a folder is in the place of a file: remove it",
    errno.EEXIST: "something else is in its place: remove it",
    errno.EIO: "its disk or network file system fails: check it",
    errno.ESTALE: "its network file system lost it: check the mount",
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``; a kill or a power loss leaves the old file or the new one.

    The content goes to a hidden file beside it, reaches the disk, and is then renamed.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` permanent.

    A rename reaches the disk with its folder, not with the file.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remedy(error: Exception) -> str:
    """What helps against an error of the file system, or an empty text where we do not know.

    Libraries written in Rust (safetensors) raise errors of their own that end with ``(os error
    NUMBER)``.
    """
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"os error (\d+)", str(error))):
        number = int(found[1])
    return _REMEDIES.get(number, "")
