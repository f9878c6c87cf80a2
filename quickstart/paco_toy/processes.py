"""The quickstart's commands: run with a log and a progress bar, ended with everything they started; and their memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

MARK = "PACO_QUICKSTART_ID"  # in the environment of everything we start, so that detached servers are found too
# Starts its arguments so that they get SIGTERM when we die, however we die (prctl, PR_SET_PDEATHSIG).
_TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[1], sys.argv[1:])"""
Progress = Callable[[str], "tuple[float | None, str] | None"]


class QuickstartError(RuntimeError):
    """The quickstart cannot continue; the text is the whole message."""


def steps(line: str) -> tuple[float | None, str] | None:
    """Progress of a line such as `step 300/600  loss 0.21` or `12/60 …`: (fraction done, the line), else None.

    Only at the beginning of a line: loading bars of libraries (`Converting …: 49%| 10/20 [`) are not the command's progress.
    """
    found = re.match(r"\s*(?:step |item |epoch )?(\d+)\s*/\s*(\d+)(?:\s|$)", line)
    if not found or not 0 < int(found[2]) or int(found[1]) > int(found[2]):
        return None
    return int(found[1]) / int(found[2]), line.strip()


def marked(mark: str) -> Iterator[psutil.Process]:
    """The processes that a driver with this mark started, their children and detached servers among them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process


def end_marked(mark: str, gently_s: float = 20.0) -> int:
    """End all ``marked`` processes: SIGTERM, later SIGKILL. Returns how many there were."""
    ended: set[psutil.Process] = set()
    for number, patience in ((signal.SIGTERM, gently_s), (signal.SIGKILL, 10.0)):
        signaled: set[psutil.Process] = set()
        deadline = time.monotonic() + patience
        while (found := set(marked(mark))) and time.monotonic() < deadline:
            for process in found - signaled:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            signaled |= found
            psutil.wait_procs(found, timeout=0.2)
        ended |= signaled
    return len(ended)


class Commands:
    """Runs commands one after the other.

    Args:
        logs: Folder for one log file per command.
        watch: Called with the activity, the fraction done (or None) and a line of progress, several times a second.
    """

    def __init__(self, logs: Path, watch: Callable[[str, float | None, str], None]) -> None:
        self.logs, self.watch = logs, watch
        self.running: subprocess.Popen | None = None

    def run(
        self,
        command: Sequence[object],
        cwd: Path,
        log: str,
        what: str,
        *,
        progress: Progress = steps,
        span: tuple[float, float] = (0.0, 1.0),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run to the end; returns the output (stdout and stderr together).

        Args:
            span: The command's part of the stage, for the progress bar.

        Raises:
            QuickstartError: It failed. The message has its last lines and the path of its log.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.log"
        words = [str(word) for word in command]
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"$ cd {cwd} && {' '.join(words)}\n")
            file.flush()
            # In a new session: Ctrl-C reaches only us, and we end the whole group in order.
            tied = [sys.executable, "-I", "-S", "-c", _TIED] if sys.platform == "linux" else []
            process = self.running = subprocess.Popen(
                [*tied, *words], cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        fraction, text = None, ""
        with open(path, encoding="utf-8", errors="replace") as file:
            file.readline()
            over = False
            while not over:
                over = process.poll() is not None
                for line in re.split(r"[\r\n]+", file.read()):  # progress bars rewrite a line with carriage returns
                    fraction, text = progress(line) or (fraction, text)
                # Without progress lines the bar stays where the command's part begins; the first command shows no bar.
                done = (span[0] or None) if fraction is None else span[0] + (span[1] - span[0]) * fraction
                self.watch(what, done, text)
                time.sleep(0 if over else 0.1)
        self.running = None
        output = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[1]
        if process.returncode != 0:
            raise QuickstartError(failure(what, process.returncode, output, path))
        return output

    def stop(self) -> None:
        """End the running command and everything it started: SIGTERM, after ten seconds SIGKILL."""
        process, self.running = self.running, None
        if process is None or process.poll() is not None:
            return
        for signal_number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal_number)
                process.wait(patience)
                return


def failure(what: str, status: int, output: str, log: Path) -> str:
    """One message for a failed command: its error line and what follows, else its last lines."""
    if re.search(r"No space left on device|Errno 28|os error 28|Disk quota exceeded", output):
        return f"{what} failed: no space left on the disk. Free some space and run the quickstart again; it continues from here."
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"(?i)\s*(error|launch|stop\w*):", line)]
    shown = lines[errors[-1] :][:12] if errors else lines[-12:]
    ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    if status in (-9, 137):
        ended += " (out of memory?)"
    return f"{what} {ended}:\n" + "\n".join("  | " + line for line in shown) + f"\nThe whole log: {log}"


class MemoryWatch:
    """The largest sum of resident memory over all our processes, sampled in a thread.

    Processes are found by a mark in their environment, which detached servers keep. Shared pages count once per process:
    the figure is an upper bound.
    """

    def __init__(self, interval: float = 0.5) -> None:
        self.interval, self.peak_bytes = interval, 0
        self.mark = os.environ.setdefault(MARK, uuid.uuid4().hex)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_mb(self) -> int:
        """Peak in MiB."""
        return round(self.peak_bytes / 2**20)

    def sample(self) -> int:
        """Bytes resident now."""
        total = 0
        for process in (psutil.Process(), *marked(self.mark)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _loop(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()
