"""The quickstart's sub-commands: run with a full log, watched, ended as a group; and the memory of all of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

MARK = "PACO_QUICKSTART_ID"  # in the environment of everything we start, so that detached servers are counted too
FULL = re.compile(r"No space left on device|Errno 28|os error 28|Disk quota exceeded")
Progress = Callable[[str], "tuple[float | None, str] | None"]


class QuickstartError(RuntimeError):
    """The quickstart cannot go on; the text is the whole message."""


def steps(line: str) -> tuple[float | None, str] | None:
    """Progress of a line such as `step 300/600  loss 0.21` or `12/60 …`: (fraction done, the line), else None.

    Only at the beginning of a line: loading bars of libraries (`Converting …: 49%| 10/20 [`) are not the command's progress.
    """
    found = re.match(r"\s*(?:step |item |epoch )?(\d+)\s*/\s*(\d+)(?:\s|$)", line)
    if not found or not 0 < int(found[2]) or int(found[1]) > int(found[2]):
        return None
    return int(found[1]) / int(found[2]), line.strip()


class Commands:
    """Runs commands one after the other; `watch(fraction, text)` sees their progress.

    Args:
        logs: Folder for one log file a command.
        watch: Called with what is being done, the fraction (or None) and a line, several times a second.
    """

    def __init__(self, logs: Path, watch: Callable[[str, float | None, str], None]) -> None:
        self.logs, self.watch = logs, watch
        self.running: subprocess.Popen | None = None

    def run(
        self,
        command: Sequence[str | Path],
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
            span: The part of the stage that this command is, for the progress bar.

        Raises:
            QuickstartError: It failed; with its last lines and where its log is.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.log"
        words = [str(word) for word in command]
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"$ cd {cwd} && {' '.join(words)}\n")
            file.flush()
            # A session of its own: Ctrl-C reaches us only, and we end the whole group in order.
            process = self.running = subprocess.Popen(
                words, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._follow(process, path, what, progress, span)
        self.running = None
        output = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[1]
        if process.returncode != 0:
            raise QuickstartError(failure(what, process.returncode, output, path))
        return output

    def _follow(self, process, path: Path, what: str, progress: Progress, span: tuple[float, float]) -> None:
        begin, end = span
        fraction, text = None, ""
        with open(path, encoding="utf-8", errors="replace") as log:
            log.readline()
            while True:
                over = process.poll() is not None
                # tqdm-like bars rewrite a line with carriage returns
                for line in re.split(r"[\r\n]+", log.read()):
                    said = progress(line)
                    if said:
                        fraction, text = said
                # A command that says nothing leaves the bar where it began; the first one shows none.
                done = (begin or None) if fraction is None else begin + (end - begin) * fraction
                self.watch(what, done, text)
                if over:
                    return
                time.sleep(0.1)

    def stop(self) -> None:
        """End the running command and all it started: gently, after ten seconds hard."""
        process, self.running = self.running, None
        if process is None or process.poll() is not None:
            return
        for signal_number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            try:
                os.killpg(process.pid, signal_number)
                process.wait(patience)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def failure(what: str, status: int, output: str, log: Path) -> str:
    """One message for a failed command: the cause where the command says it in one line, else its last lines."""
    if FULL.search(output):
        return f"{what} failed: no space left on the disk. Free some and run the quickstart again; it goes on from here."
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = [i for i, line in enumerate(lines) if re.match(r"(?i)\s*(error|launch|stop\w*):", line)]
    shown = lines[said[-1] :][:12] if said else lines[-12:]
    ended = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    if status in (-9, 137):
        ended += " (out of memory?)"
    return f"{what} {ended}:\n" + "\n".join("  | " + line for line in shown) + f"\nThe whole log: {log}"


class MemoryWatch:
    """The largest sum of resident memory over all our processes, sampled in a thread.

    Processes are found by a mark in their environment, which servers that detach from us keep. Shared pages count once
    for each process: the figure is an upper bound.
    """

    def __init__(self, interval: float = 0.5) -> None:
        self.interval, self.peak_bytes = interval, 0
        self.mark = os.environ.setdefault(MARK, uuid.uuid4().hex)
        self._known: dict[tuple[int, str], bool] = {}
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
        page = os.sysconf("SC_PAGE_SIZE")
        total = 0
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
                started = stat.rpartition(")")[2].split()[19]
                if self._ours(int(entry), started):
                    total += int(stat.rpartition(")")[2].split()[21]) * page
            except (OSError, IndexError, ValueError):  # ended meanwhile
                continue
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _ours(self, pid: int, started: str) -> bool:
        if pid == os.getpid():  # /proc shows the environment we were started with
            return True
        # A process that is about to exec still shows its parent's environment: ask again until it is ours.
        if not self._known.get((pid, started)):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            self._known[pid, started] = f"{MARK}={self.mark}".encode() in environment
        return self._known[pid, started]

    def _loop(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()
