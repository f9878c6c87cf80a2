"""Start a judge server and wait until it answers.

Environment: VLLM_MODEL_PATHS, VLLM_MODEL_NAMES (default: the folder's name), VLLM_PORT (8000), VLLM_HOST (127.0.0.1),
VLLM_LABEL (default), VLLM_ENGINE (auto | vllm | transformers), GPU_MEMORY_UTILIZATION (0.85), MAX_MODEL_LEN (8192),
CUDA_VISIBLE_DEVICES, VLLM_API_KEY (then required of callers), VLLM_EXTRA_ARGS (passed on to the engine),
VLLM_START_TIMEOUT (1800 seconds), VLLM_PYTHON (vLLM's interpreter), PACO_RUNTIME_DIR (where state and logs lie).
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from vllm_server.engines import Engine, child_environment, choose_engine, command, visible_gpus
from vllm_server.processes import Process, end_processes, session_members
from vllm_server.settings import LaunchError, LaunchSettings, check_model, check_port
from vllm_server.state import GroupState, LabelFolder, ServerRecord, runtime_root

_POLL_S, _PROGRESS_S, _QUIET_S, _LOG_LINES = 0.25, 3.0, 20.0, 40


class Interrupted(Exception):
    """A signal asked the launch to end."""


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP as exceptions, held back where an exception would leave a process behind."""

    def __init__(self):
        self._holding, self._received = False, None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals are remembered meanwhile; ``release`` raises them."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def hold(self) -> None:
        """From here on signals are remembered, until ``let_go``."""
        self._holding = True

    def let_go(self) -> None:
        """End ``hold``; a signal that came meanwhile is raised now."""
        self._holding = False
        self.release()

    def release(self) -> None:
        """Raise the signal that came while they were held, if any."""
        if self._received is not None:
            raise Interrupted(self._received)

    def _handle(self, number: int, frame: object) -> None:
        if self._holding:
            self._received = signal.Signals(number).name
        else:
            raise Interrupted(signal.Signals(number).name)


def launch(environment: Mapping[str, str], foreground: bool, interrupts: Interrupts) -> int:
    """Check, start, wait until ready; in the foreground also wait for the end. Returns an exit status."""
    settings = LaunchSettings.from_environment(environment)
    folder = LabelFolder(runtime_root(environment), settings.label)
    with folder.locked():
        _check_not_running(folder)
        model = settings.models[0]
        config = check_model(model)
        check_port(settings.host, settings.port)
        engine = choose_engine(settings, environment)
        gpus = visible_gpus(environment)
        print(f"Engine: {engine.name} {engine.version} ({engine.python}), {gpus or 'no'} GPU{'' if gpus == 1 else 's'}")
        print(f"Model:  {model.name} from {model.path}", flush=True)
        with interrupts.held():
            child, record = _start(settings, engine, config, environment, gpus, folder, foreground)
            state = GroupState(settings.label, ready=False, servers=(record,))
        try:
            interrupts.release()
            folder.write(state)
            _wait_until_ready(child, record, settings)
            interrupts.hold()  # it is up: a signal no longer undoes the launch; in the foreground _stay sees to it
            record = replace(record, members=tuple(session_members(record.leader)))
            folder.write(replace(state, ready=True, servers=(record,)))
        except BaseException:  # whatever ends the launch (Ctrl-C included) leaves no process behind
            with interrupts.held():
                end_processes([], record.leader, gently_s=5.0)
                child.wait()
                folder.remove()
            raise
    _say_ready(settings, record)
    return _stay(child, folder, record, interrupts) if foreground else 0


def _check_not_running(folder: LabelFolder) -> None:
    state = folder.read()
    running = [server for server in state.servers if server.leader.alive()] if state else []
    if running:
        raise LaunchError(
            f"label {folder.label!r} is in use: {running[0].name} on port {running[0].port}. End it with "
            f"`VLLM_LABEL={folder.label} bash vllm_server/stop.sh`, or choose another VLLM_LABEL"
        )


def _start(
    settings: LaunchSettings,
    engine: Engine,
    config: dict,
    environment: Mapping[str, str],
    gpus: int,
    folder: LabelFolder,
    foreground: bool,
) -> tuple[subprocess.Popen, ServerRecord]:
    model = settings.models[0]
    log = None if foreground else folder.log(model.name)
    # A log's descriptor is the server's; ours is closed once it has been passed on.
    output = os.dup(sys.stdout.fileno()) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        child = subprocess.Popen(
            command(engine, settings, model, config, gpus),
            env=child_environment(engine, environment, gpus),
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # survives the shell, and can be ended as a whole
        )
    except OSError as error:
        raise LaunchError(f"cannot start {engine.python}: {error}") from error
    finally:
        os.close(output)
    leader = Process.of(child.pid)
    if leader is None:
        child.wait()
        raise LaunchError(f"the server ended at once.\n{_end_of(log)}")
    path = str(log) if log else None
    return child, ServerRecord(model.name, model.path, settings.host, settings.port, engine.name, path, leader)


def _wait_until_ready(child: subprocess.Popen, record: ServerRecord, settings: LaunchSettings) -> None:
    started = said = time.monotonic()
    said_line = ""
    log = Path(record.log) if record.log else None
    while True:
        healthy = answers(settings.url, record.name, settings.api_key)
        status = child.poll()
        if healthy and status is None:
            return
        now = time.monotonic()
        if status is not None:
            raise LaunchError(f"the server ended with status {status} while loading.\n{_end_of(log)}")
        if now - started > settings.start_timeout_s:
            raise LaunchError(
                f"the server did not answer within {settings.start_timeout_s:g} s (VLLM_START_TIMEOUT).\n{_end_of(log)}"
            )
        line = _last_line(log)
        if now - said > (_PROGRESS_S if line != said_line else _QUIET_S):
            said, said_line = now, line
            print(f"  loading, {now - started:.0f} s: {line}", flush=True)
        time.sleep(_POLL_S)


def answers(url: str, name: str, api_key: str | None, timeout_s: float = 5.0) -> bool:
    """Whether a healthy server at ``url`` serves ``name``."""
    address = urlsplit(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            return False
        connection.request("GET", "/v1/models", headers=headers)
        return name in [entry["id"] for entry in json.loads(connection.getresponse().read())["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()


def _say_ready(settings: LaunchSettings, record: ServerRecord) -> None:
    print(f"Ready:  {record.name} at {settings.url}/v1 (pid {record.leader.pid})")
    if record.log:
        print(f"Log:    {record.log}")
    print(f"Stop:   VLLM_LABEL={settings.label} bash vllm_server/stop.sh", flush=True)


def _stay(child: subprocess.Popen, folder: LabelFolder, record: ServerRecord, interrupts: Interrupts) -> int:
    """Wait for the server; a signal to us ends it."""
    try:
        interrupts.let_go()
        status = child.wait()
    except Interrupted:
        with interrupts.held():
            print("Stopping…", flush=True)
            end_processes(list(record.members), record.leader)
            child.wait()
            status = 0
    else:
        end_processes(list(record.members), None)
    folder.remove_ended()
    return status if status >= 0 else 128 - status


def _end_of(log: Path | None) -> str:
    if log is None:
        return "Its output is above."
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"End of its log ({log}):", *(f"  | {line}" for line in lines)])


def _last_line(log: Path | None) -> str:
    if log is None:
        return "…"
    with open(log, "rb") as handle:
        handle.seek(max(0, log.stat().st_size - 4000))
        lines = [
            line for line in handle.read().decode(errors="replace").replace("\r", "\n").split("\n") if line.strip()
        ]
    return lines[-1].strip()[:120] if lines else "…"


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="launch.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--foreground", action="store_true", help="stay with the server (containers); signals end it")
    arguments = parser.parse_args()
    interrupts = Interrupts()
    interrupts.install()
    try:
        return launch(os.environ, arguments.foreground, interrupts)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"launch: interrupted ({error}); nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
