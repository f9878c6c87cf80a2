"""Ending processes: gently, then forcibly, with their children, and never a process of somebody else."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving_tools import wait_for

from vllm_server.processes import Process, end_processes, port_users, session_members


def start(*command) -> subprocess.Popen:
    """A process that has printed its first line, as the leader of a session."""
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child


def sleeper(program: str = "sleep") -> subprocess.Popen:
    return start("sh", "-c", f"echo up; exec '{program}' 60")


def test_a_process_is_its_pid_and_its_start(tmp_path):
    program = tmp_path / "a) S (b"  # /proc shows names unquoted
    program.symlink_to("/bin/sleep")
    child = sleeper(str(program))
    wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text().strip() == program.name)
    process = Process.of(child.pid)
    assert process.alive() and not Process(child.pid, process.started + 1).alive()
    child.kill()
    wait_for(lambda: not process.alive())  # a zombie has ended
    child.wait()
    assert not process.alive() and Process.of(child.pid) is None


def test_a_reused_pid_is_left_alone():
    innocent = sleeper()
    recorded = Process(innocent.pid, Process.of(innocent.pid).started - 1)
    assert session_members(recorded) == []
    assert end_processes([recorded], [recorded], gently_s=1.0) == []
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


def test_children_end_with_their_leader_and_after_it():
    for kill_leader_first in (False, True):
        child = start("sh", "-c", "sleep 61 & sleep 62 & echo up; wait")
        leader = Process.of(child.pid)
        members = session_members(leader)
        assert len(members) == 3 and leader in members
        if kill_leader_first:
            child.kill()
            child.wait()
        assert end_processes(members, [leader], gently_s=2.0) == []
        child.wait()
        assert not any(member.alive() for member in members)


LISTEN = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 0), reuse_port=True, family=family)
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


IPV6 = Path("/proc/net/if_inet6")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0.0.0.0", *(["::1"] if IPV6.exists() and "lo" in IPV6.read_text() else [])]
)
def test_who_listens_on_a_port(host):
    address = {"localhost": "127.0.0.1"}.get(host, host)
    child = subprocess.Popen([sys.executable, "-c", LISTEN, address], start_new_session=True, stdout=subprocess.PIPE)
    port, leader = int(child.stdout.readline()), Process.of(child.pid)
    try:
        assert port_users(host, port, leader) == (True, None)
        ours, other = port_users(host, port)
        assert not ours and other.startswith(f"pid {child.pid} ({sys.executable} ")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, port), family=family, reuse_port=True):
            ours, other = port_users(host, port, leader)
            assert ours and other.startswith(f"pid {os.getpid()} ")
        if host == "127.0.0.1":
            with socket.create_server(("127.0.0.2", port)):
                assert port_users(host, port, leader) == (True, None), "no request to us arrives there"
    finally:
        child.kill()
        child.wait()
    assert port_users(host, port, leader) == (False, None)
