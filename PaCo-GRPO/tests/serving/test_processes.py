import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_server.processes import Process, end_processes, session_members

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def start(*command, **settings) -> subprocess.Popen:
    return subprocess.Popen(command, start_new_session=True, **settings)


def test_a_process_is_its_pid_and_its_start():
    child = start("sleep", "60")
    process = Process.of(child.pid)
    assert process.alive()
    assert not Process(child.pid, process.started + 1).alive()
    child.kill()
    time.sleep(0.1)
    assert not process.alive(), "a zombie has ended"
    child.wait()
    assert not process.alive() and Process.of(child.pid) is None


def test_a_name_with_brackets_and_spaces_is_read(tmp_path):
    program = tmp_path / "a) S (b"
    program.symlink_to("/bin/sleep")
    child = start(str(program), "60")
    time.sleep(0.2)
    assert Path(f"/proc/{child.pid}/comm").read_text().strip() == "a) S (b"
    assert Process.of(child.pid).alive()
    child.kill()
    child.wait()


def test_a_pid_that_belongs_to_another_process_now_is_left_alone():
    innocent = start("sleep", "60")
    recorded = Process(innocent.pid, Process.of(innocent.pid).started - 1)
    assert session_members(recorded) == []
    assert end_processes([recorded], [recorded], gently_s=1.0) == []
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


def test_gently_first():
    child = start(sys.executable, "-c", "import signal, sys, time\n"
                  "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('up', flush=True)\ntime.sleep(60)",
                  stdout=subprocess.PIPE)  # fmt: skip
    child.stdout.readline()
    process = Process.of(child.pid)
    assert end_processes([], [process]) == []
    assert child.wait() == 7


def test_hard_when_it_does_not_listen():
    child = start(sys.executable, "-c", STUBBORN, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert end_processes([], [Process.of(child.pid)], gently_s=0.3) == []
    assert child.wait() == -signal.SIGKILL


def test_children_are_ended_with_their_leader_and_after_it():
    for kill_leader_first in (False, True):
        child = start("sh", "-c", "sleep 61 & sleep 62 & echo up; wait", stdout=subprocess.PIPE)
        child.stdout.readline()
        leader = Process.of(child.pid)
        members = session_members(leader)
        assert len(members) == 3 and leader in members
        if kill_leader_first:
            child.kill()
            child.wait()
        assert end_processes(members, [leader], gently_s=2.0) == []
        child.wait()
        assert not any(member.alive() for member in members)
