"""Runs a command with a log and a progress bar: `python -m paco_toy.progress LOG COMMAND …` (used by run.sh and editing.sh).

Exit status: the command's. When it fails, its error line or its last lines are shown. When this process is ended, the
command and everything it started end, too. The peak memory of all processes of the quickstart goes to `peak_mb` beside
the folder of logs.
"""

from __future__ import annotations

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

MARK = "PACO_QUICKSTART_ID"  # in the environment of all processes of one quickstart, detached servers among them
# `12/60 …`, `step 300/600  loss 0.21`, and a bar without a name: ` 78%|███▊ | 12/60 [`; not `Loading …: 49%| 10/20 [`.
_STEP = re.compile(r"(?:\d+%\|[^|]*\| )?(?:step |item )?(\d+)\s*/\s*(\d+)(?:[\s:]|$)")
_LEFT = re.compile(r"([\d.]+) min of training left")  # the trainer, which may end by its time before its last epoch


def fraction_done(line: str, seconds: float) -> float | None:
    """The share of its work that a command reports ``seconds`` after it began, in a line of its output; else None."""
    if left := _LEFT.search(line):
        return seconds / (seconds + 60 * float(left[1]))
    found = _STEP.match(line.strip())
    if not found or not 0 < int(found[2]) or int(found[1]) > int(found[2]):
        return None
    return int(found[1]) / int(found[2])


def clock(seconds: float) -> str:
    """`3:07`."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def failure(output: str) -> str:
    """What to show of a failed command's output: its error line and what follows, else its last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"(?i)\s*(error|launch|stop\w*):", line)]
    return "\n".join("  | " + line for line in (lines[errors[-1] :][:12] if errors else lines[-12:]))


def resident_mb() -> int:
    """MiB resident in all processes of this quickstart; shared pages count once per process."""
    total, mark = 0, os.environ.get(MARK)
    for process in psutil.process_iter() if mark else ():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.environ().get(MARK) == mark:
                total += process.memory_info().rss
    return total >> 20


def show(text: str, live: bool) -> None:
    """A line of progress: on a terminal it replaces the last one."""
    width = shutil.get_terminal_size((100, 24)).columns - 1
    print(f"\r\x1b[2K{text[:width]}" if live else text, end="" if live else "\n", flush=True)


def run(log: Path, command: list[str]) -> int:
    """Run the command to its end; returns its exit status."""
    what, live, began = log.stem, sys.stdout.isatty(), time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"$ cd {os.getcwd()} && {' '.join(command)}\n", encoding="utf-8")
    with open(log, "a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    shown, done, text, peak, over = began, None, "", 0, False
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            file.readline()
            while not over:
                over, now = process.poll() is not None, time.monotonic()
                for line in re.split(r"[\r\n]+", file.read()):  # progress bars rewrite a line with carriage returns
                    if (found := fraction_done(line, now - began)) is not None:
                        done, text = found, line.rpartition("|")[2].strip()
                if now - shown >= (0.5 if live else 20):
                    shown, peak = now, max(peak, resident_mb())
                    full = round(20 * (done or 0))
                    bar = "" if done is None else f" {'█' * full}{'░' * (20 - full)} {done:4.0%}"
                    show(f"      {what}{bar}  {clock(now - began)}  {text}", live)
                time.sleep(0 if over else 0.1)
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(patience)
                break
    file = log.parent.parent / "peak_mb"
    file.write_text(str(max(peak, int(file.read_text()) if file.is_file() else 0)))
    if process.returncode == 0:
        show(f"      {what}: {clock(time.monotonic() - began)}" + ("\n" if live else ""), live)
        return 0
    output = log.read_text(encoding="utf-8", errors="replace").partition("\n")[2]
    print(f"\n{what} failed with status {process.returncode}:\n{failure(output)}\nThe whole log: {log}", file=sys.stderr)
    return process.returncode if process.returncode > 0 else 1


def main() -> int:
    """Command line; 130 when it was interrupted."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(AttributeError, OSError):  # SIGTERM when the parent dies, however it dies (Linux: PR_SET_PDEATHSIG)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return run(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
