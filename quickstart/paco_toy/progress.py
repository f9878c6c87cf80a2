"""Runs a command with a log for run.sh and editing.sh: `python -m paco_toy.progress LOG COMMAND …`.

While it runs, the last line of its output is shown, with a progress bar; when it fails, its last
lines. When this process ends, even by SIGKILL, the command is asked to end, too.
``--wait-for-earlier FOLDER …`` waits for commands with a log in these folders that still end.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

RUNNING = ".running"  # beside the logs: process id and start time of the command that runs
# A trainer finishes its batch and saves. SIGKILL would lose the epochs since the last checkpoint.
_GRACE_S = 60
_EARLIER_S = 90


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that are not empty; a progress bar rewrites its line with carriage returns."""
    lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace")[-4000:])
    return [line.strip() for line in lines if line.strip()][-count:]


def with_bar(line: str) -> str:
    """With a bar in front, if the line is about a step of many, such as "epoch 6/20: …".

    A line with a bar of its own stays as it is.
    """
    fraction = re.search(r"\b(\d+)\s*/\s*(\d+)\b", line)
    if fraction is None or "%|" in line:
        return line
    step = int(fraction[1])
    steps = int(fraction[2])
    if steps == 0 or step > steps:
        return line
    full = 20 * step // steps
    return f"{'█' * full}{'░' * (20 - full)} {line}"


def show(text: str) -> None:
    """Print a line, on a terminal in place of the last one."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size((100, 24)).columns - 1
        print(f"\r\x1b[2K{text[:width]}", end="", flush=True)
    else:
        print(text, flush=True)


def run(log: Path, command: list[str]) -> int:
    """Run the command to its end; returns its exit status, or 1 if a signal ended it."""
    is_terminal = sys.stdout.isatty()
    began = shown = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"$ cd {os.getcwd()} && {' '.join(command)}\n", encoding="utf-8")
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).create_time()
        (log.parent / RUNNING).write_text(f"{process.pid} {started}")
    try:
        while process.poll() is None:
            if time.monotonic() - shown >= (0.5 if is_terminal else 20):
                shown = time.monotonic()
                line = with_bar(*last_lines(log, 1))
                show(f"      {log.stem}  {shown - began:.0f} s  {line}")
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            end(process)
    show(f"      {log.stem}: {time.monotonic() - began:.0f} s")
    if is_terminal:
        print()
    if process.returncode:
        lines = "".join(f"  | {line}\n" for line in last_lines(log, 12))
        print(
            f"{log.stem} failed with status {process.returncode}:\n{lines}The whole log: {log}",
            file=sys.stderr,
        )
    return process.returncode if process.returncode >= 0 else 1


def end(process: subprocess.Popen) -> None:
    """End the command and its process group."""
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience)
            return


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent ends, even by SIGKILL.

    The first argument of prctl is PR_SET_PDEATHSIG of Linux.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def earlier_processes(logs: Path) -> list[psutil.Process]:
    """The processes of a noted command that are still there.

    A process id that was given again does not count.
    """
    try:
        pid, start = (logs / RUNNING).read_text().split()
        session = int(pid)
        started = float(start)
    except (OSError, ValueError):
        return []
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.create_time() >= started - 1:
                processes.append(process)
    return [process for process in processes if computes(process)]


def computes(process: psutil.Process) -> bool:
    """Whether it has not ended. In a container without an init process, zombies stay forever."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_earlier(folders: list[Path]) -> int:
    """Wait until the commands of a killed run have ended.

    Returns exit status 1, after one message, if they do not.
    """
    processes = [process for folder in folders for process in earlier_processes(folder)]
    if not processes:
        return 0
    pids = " ".join(str(process.pid) for process in processes)
    started = time.strftime("%H:%M:%S", time.localtime(processes[0].create_time()))
    print(
        f"a killed quickstart left process {pids} (started {started}); waiting for its end",
        flush=True,
    )
    deadline = time.monotonic() + _EARLIER_S
    while processes and time.monotonic() < deadline:
        time.sleep(0.2)
        processes = [process for process in processes if computes(process)]
    if not processes:
        return 0
    pids = " ".join(str(process.pid) for process in processes)
    print(
        f"it has not ended; end it with `kill {pids}` and run the quickstart again", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "--wait-for-earlier":
        sys.exit(wait_for_earlier([Path(folder) for folder in sys.argv[2:]]))
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
