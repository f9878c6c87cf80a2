"""Runs a command with a log: `python -m paco_toy.progress LOG COMMAND …` (used by run.sh and editing.sh).

While it runs, the last line of its output is shown, with a progress bar; when it fails, its last lines. When this process is
ended, the command and everything it started end, too.
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


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that are not empty; a progress bar rewrites its line with carriage returns."""
    lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace")[-4000:])
    return [line.strip() for line in lines if line.strip()][-count:]


def with_bar(line: str) -> str:
    """With a bar in front, if the line speaks of a step of many ("epoch 6/20: …") and has no bar of its own."""
    found = re.search(r"\b(\d+)\s*/\s*(\d+)\b", line)
    if "%|" in line or not found or not 0 < int(found[2]) >= int(found[1]):
        return line
    full = 20 * int(found[1]) // int(found[2])
    return f"{'█' * full}{'░' * (20 - full)} {line}"


def show(text: str) -> None:
    """Print a line, on a terminal in place of the last one."""
    live, width = sys.stdout.isatty(), shutil.get_terminal_size((100, 24)).columns - 1
    print(f"\r\x1b[2K{text[:width]}" if live else text, end="" if live else "\n", flush=True)


def run(log: Path, command: list[str]) -> int:
    began = shown = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"$ cd {os.getcwd()} && {' '.join(command)}\n", encoding="utf-8")
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        while process.poll() is None:
            if time.monotonic() - shown >= (0.5 if sys.stdout.isatty() else 20):
                shown = time.monotonic()
                show(f"      {log.stem}  {shown - began:.0f} s  {with_bar(*last_lines(log, 1))}")
            time.sleep(0.1)
    finally:
        for number, patience in (
            ((signal.SIGTERM, 10), (signal.SIGKILL, 5)) if process.poll() is None else ()
        ):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(patience)
                break
    show(
        f"      {log.stem}: {time.monotonic() - began:.0f} s"
        + ("\n" if sys.stdout.isatty() else "")
    )
    if process.returncode:
        lines = "".join(f"  | {line}\n" for line in last_lines(log, 12))
        print(
            f"{log.stem} failed with status {process.returncode}:\n{lines}The whole log: {log}",
            file=sys.stderr,
        )
    return process.returncode if process.returncode >= 0 else 1


if __name__ == "__main__":
    with contextlib.suppress(
        AttributeError, OSError
    ):  # SIGTERM even if the parent is killed (Linux: PR_SET_PDEATHSIG)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
