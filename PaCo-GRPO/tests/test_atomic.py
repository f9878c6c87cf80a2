"""Files that are whole or not there."""

import errno
import os

import pytest

from paco_grpo.atomic import write_atomically


def test_text_and_bytes_replace_a_file(tmp_path):
    path = tmp_path / "plan.json"
    for content in ("größer", b"\x00\xff", ""):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("at", ["fsync", "rename"])
def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, at):
    path = tmp_path / "plan.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    """Otherwise a power loss leaves an empty file under the final name."""
    calls = []
    fsync = os.fsync
    replace = type(tmp_path).replace

    def sync(descriptor):
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def rename(path, target):
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(type(tmp_path), "replace", rename)
    write_atomically(tmp_path / "plan.json", "new")
    assert calls == ["file", "rename", "folder"]
