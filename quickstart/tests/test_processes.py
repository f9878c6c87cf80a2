"""Sub-commands of the quickstart: logs, progress, messages on failure, ending a whole process tree."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paco_toy.processes import MARK, Commands, MemoryWatch, QuickstartError, end_marked, failure, steps


@pytest.mark.parametrize(("line", "fraction"), [
    ("step 300/600  loss 0.41  elapsed 0:00:45", 0.5), ("12/60 0011", 0.2), ("epoch 3 / 4", 0.75), ("nothing", None),
    ("see /a/1/2/file", None), ("Converting format: 49%|██| 7870/16000 [00:26<00:16]", None), ("7/3 is no progress", None), ("0/0", None), ("2026/11/20 words", None),
])
def test_steps(line, fraction):
    said = steps(line)
    assert (said and said[0]) == fraction


@pytest.fixture
def commands(tmp_path):
    seen = []
    made = Commands(tmp_path / "logs", lambda *what: seen.append(what))
    made.seen = seen
    yield made
    made.stop()


def test_output_is_returned_and_logged_with_the_command(commands, tmp_path):
    said = commands.run(["bash", "-c", "echo out; echo err >&2; echo $EXTRA; pwd"], tmp_path, "one", "trying", env={"EXTRA": "7"})
    assert said.split() == ["out", "err", "7", str(tmp_path)]
    log = (tmp_path / "logs/one.log").read_text()
    assert log.startswith(f"$ cd {tmp_path} && bash -c") and log.endswith(said)


def test_progress_is_scaled_to_the_commands_part(commands, tmp_path):
    commands.run(["bash", "-c", "echo step 1/2; sleep 0.3; printf 'a\\r2/2 b\\r'"], tmp_path, "one", "trying", span=(0.2, 0.6))
    fractions = [f for _, f, _ in commands.seen if f is not None]
    assert fractions == sorted(fractions)
    assert pytest.approx(0.4) in fractions and fractions[-1] == pytest.approx(0.6)


def test_a_failure_names_cause_and_log(commands, tmp_path):
    with pytest.raises(QuickstartError, match=r"trying failed with status 3:\n  \| error: the model is not there\nThe whole log: .*one\.log"):
        commands.run(["bash", "-c", "echo noise; echo 'error: the model is not there' >&2; exit 3"], tmp_path, "one", "trying")


def test_failures_in_words(tmp_path):
    assert "no space left" in failure("x", 1, "OSError: [Errno 28] No space left on device", tmp_path)
    assert "out of memory?" in failure("x", -9, "", tmp_path)
    many = failure("x", 1, "\n".join(f"line {i}" for i in range(50)), tmp_path)
    assert "line 49" in many and "line 30" not in many


def test_stop_ends_the_whole_group(commands, tmp_path):
    """A grandchild that ignores SIGTERM's first target is ended too."""
    commands.running = subprocess.Popen(["bash", "-c", "sleep 300 & echo $! > pid; wait"], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    commands.stop()
    grandchild = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{grandchild}") or "Z" in Path(f"/proc/{grandchild}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the grandchild lives on")


def test_marked_processes_are_ended_also_those_that_ignore_sigterm():
    command = ["bash", "-c", "trap '' TERM; echo ready; sleep 300; sleep 300"]
    processes = [
        subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True, start_new_session=True)
        for mark in ("a-mark-of-this-test", "another-mark-of-this-test")
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
        assert end_marked("a-mark-of-this-test", gently_s=0.5) >= 1
        assert processes[0].wait(10) is not None and processes[1].poll() is None
        assert end_marked("a-mark-of-this-test") == 0
    finally:
        end_marked("another-mark-of-this-test", gently_s=0)
        for process in processes:
            process.wait()


def test_memory_counts_servers_that_left_our_process_tree(monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    code = "x = bytearray(60_000_000); import time; print('ready', flush=True); time.sleep(60)"
    with MemoryWatch(interval=0.05) as watch:
        base = watch.sample()
        child = subprocess.Popen(["setsid", sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            child.stdout.readline()
            grown = watch.sample()
        finally:
            child.kill()
            child.wait()
    assert grown - base > 55_000_000
    assert watch.peak_mb * 2**20 >= 0.99 * grown
