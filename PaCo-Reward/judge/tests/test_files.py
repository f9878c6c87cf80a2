"""Files: locks, journals, and how commands end."""

import os
import subprocess
import sys

import pytest

from paco_judge.errors import UserError, run_command
from paco_judge.files import Journal, locked, read_json_rows, write_atomically

HOLD = """
import sys, pathlib, paco_judge.files
with paco_judge.files.locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=str(tmp_path)), locked(tmp_path):
            pass
        other.kill()  # the lock goes with its process
    with locked(tmp_path):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "state.json"
    write_atomically(file, "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\udc80")
    write_atomically(tmp_path / "other", b"two")
    assert file.read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "state.json"]


def test_a_journal_goes_on_behind_its_last_whole_line(tmp_path):
    file = tmp_path / "work" / "answers.jsonl"
    with Journal(file):
        pass
    assert not file.exists(), "without rows"
    with Journal(file) as journal:
        journal.append({"key": "a", "value": 0.25})
        journal.append({"key": "b", "value": None})
        with pytest.raises(UserError, match="answers.jsonl"), Journal(file):
            pass
    with file.open("a") as cut_off:
        cut_off.write('{"key": "c", "val')
    with Journal(file) as journal:
        assert journal.rows == [{"key": "a", "value": 0.25}, {"key": "b", "value": None}]
        journal.append({"key": "d", "value": "é"})
    with Journal(file) as journal:
        assert [row["key"] for row in journal.rows] == ["a", "b", "d"]


@pytest.mark.parametrize("line", [b"[1]", b'{"key": ', b"\x80"])
def test_a_damaged_line_is_named(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"key": 1}\n\n' + line + b"\n")
    with pytest.raises(UserError, match="rows.jsonl line 3"), Journal(file):
        pass


@pytest.mark.parametrize("text", ['[{"a": 1},\n{"a": "é"}]', '{"a": 1}\n\n{"a": "é"}'])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_rows_are_a_list_or_lines(tmp_path, text, encoding):
    file = tmp_path / "rows.json"
    file.write_text(text, encoding=encoding)
    assert read_json_rows(file) == [{"a": 1}, {"a": "é"}]
    file.write_text("[{}")
    with pytest.raises(UserError, match="rows.json"):
        read_json_rows(file)


PARENT = """
import subprocess, sys
child = "from paco_judge.errors import *; end_with_parent(); print(1, flush=True); input()"
subprocess.Popen([sys.executable, "-c", child], stdin=0).wait()
"""


def test_a_process_ends_with_its_killed_parent():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"1\n"
        parent.kill()
        assert parent.stdout.read() == b""  # whose other end the child had, too


def test_how_a_command_ends(capsys, monkeypatch):
    def fail(error):
        raise error

    assert run_command(lambda: 3) == 3
    assert run_command(lambda: fail(UserError("set x"))) == 1
    assert run_command(lambda: fail(OSError("full")), OSError) == 1
    assert run_command(lambda: fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.startswith("error: set x\nerror: full\n")
    with pytest.raises(KeyError):
        run_command(lambda: fail(KeyError("a defect")))
    # One of several processes gives the main one the time to say it first.
    waited = []
    monkeypatch.setattr("paco_judge.errors.time.sleep", waited.append)
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        assert run_command(lambda: fail(UserError("set x"))) == 1
    assert len(waited) == 1 and capsys.readouterr().err == "error: set x\n" * 2


ENDS = """
import atexit, os, sys, paco_judge.errors
class Aborts:
    def __del__(self):
        os.abort()
kept = Aborts()
atexit.register(print, "closed")
print("done")
paco_judge.errors.end_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("launched", "status"), [(True, 0), (True, 3), (False, -6)])
def test_a_launched_process_ends_without_pythons_teardown(launched, status):
    """What aborts there does not make a finished training a failed one."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    if launched:
        environment["LOCAL_RANK"] = "1"
    arguments = [sys.executable, "-c", ENDS, str(max(status, 0))]
    ended = subprocess.run(arguments, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == status
    assert ended.stdout == "done\nclosed\n"
