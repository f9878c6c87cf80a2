"""Start judge servers and wait until they answer.

One model answers on VLLM_PORT itself. With several models or an API key, engines get private loopback ports, and a
gateway on VLLM_PORT sends each request to the server of its model.

README.md beside this file describes the environment variables: VLLM_MODEL_PATHS, VLLM_MODEL_NAMES, VLLM_PORT, …
"""

import argparse
import dataclasses
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_server.engines import (
    Engine,
    check_weights,
    choose_engine,
    engine_command,
    engine_environment,
    gateway_command,
    own_environment,
)
from vllm_server.plan import LaunchError, LaunchSettings, Model, divide_gpus, read_models, visible_gpus
from vllm_server.state import GATEWAY, LabelFolder, Server, end, locked

_POLL_S, _PROGRESS_S, _LOG_LINES = 0.25, 10.0, 40
# Below the ports that the kernel gives to outgoing connections: those could take one while a model is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked the launch to end."""


def _interrupt(number: int, frame: object) -> None:
    _on_signals(signal.SIG_IGN)  # what follows is not interrupted
    raise Interrupted(signal.Signals(number).name)


def _on_signals(handler) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


@dataclass
class Planned:
    """A process to be started; ``server`` lacks pid and start time until then."""

    server: Server
    command: list[str]
    environment: dict[str, str]
    child: subprocess.Popen | None = None
    ready: bool = False


def make_plan(settings: LaunchSettings, environment: Mapping[str, str]) -> tuple[Engine, list[Model], list[Planned]]:
    """Check models, port, engine and GPUs, and decide; prints what was decided. Raises LaunchError."""
    models = read_models(settings)
    _check_port(settings.host, settings.port)
    gpus = visible_gpus(environment)
    notes = []
    if "CUDA_VISIBLE_DEVICES" not in environment and len(gpus) > len(models):
        used = ",".join(gpus[: len(models)])
        notes.append(f"Using GPU {used} of {len(gpus)}; set CUDA_VISIBLE_DEVICES to give the judge others or more")
        gpus = gpus[: len(models)]
    engine = choose_engine(settings, environment, gpus)
    gateway = len(models) > 1 or settings.api_key is not None  # vLLM's own key protects only some of its routes
    if engine.name == "vllm" and gpus:
        places, why = divide_gpus(settings, models, gpus)
        notes += why
    elif engine.name == "vllm" and any(n > 1 for n in settings.tensor_parallel + settings.replicas):
        raise LaunchError("VLLM_TP and VLLM_REPLICAS are for GPUs, and there is no GPU here; unset them")
    else:  # the transformers engine's servers alternate over the GPUs
        places = [((gpus[i % len(gpus)],) if gpus else (), 1) for i in range(len(models))]
    ports = _free_ports(len(models)) if gateway else [settings.port]
    print(f"Engine: {engine.name} {engine.version} ({engine.python}, {engine.note}), {len(gpus) or 'no'} GPU{'s' * (len(gpus) != 1)}")
    planned = []
    for model, (own_gpus, copies), port in zip(models, places, ports, strict=True):
        address = (_LOOPBACK if gateway else settings.host, port)
        url = _local_url(*address)
        server = Server(model.name, model.path, url, engine.name, model.names, own_gpus, None, 0, 0.0)
        command = engine_command(engine, settings, model, address, own_gpus, copies)
        planned.append(Planned(server, command, engine_environment(engine, own_gpus, environment)))
        place = f", GPU {','.join(own_gpus)}" * bool(own_gpus) + f", {copies} copies" * (copies > 1)
        print(f"Model:  {model.name} from {model.path}{place}{f', private port at {url}' * gateway}")
    for adapter in settings.adapters:
        print(f"        {adapter.name} (LoRA) from {adapter.path}")
    for note in notes:
        print(f"Note:   {note}")
    if gateway:
        print("Gateway in front")
        urls = {name: process.server.url for process in planned for name in process.server.names}
        front = Server(GATEWAY, "", _local_url(settings.host, settings.port), GATEWAY, tuple(urls), (), None, 0, 0.0)
        planned.insert(0, Planned(front, gateway_command(settings, urls), own_environment(environment)))
    sys.stdout.flush()
    return engine, models, planned


def _local_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on ``host``."""
    host = {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _free_ports(count: int) -> list[int]:
    """Different loopback ports that are free now."""
    found: list[int] = []
    for port in random.sample(_PRIVATE_PORTS, len(_PRIVATE_PORTS)):
        try:
            with socket.create_server((_LOOPBACK, port)):
                found.append(port)
        except OSError:
            continue
        if len(found) == count:
            break
    return found


def _check_port(host: str, port: int) -> None:
    """vLLM would share the port with another server. Raises LaunchError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise LaunchError(
            f"cannot listen on {host}:{port} ({reason}): choose another VLLM_PORT, or end the program that uses it "
            "(`bash vllm_server/status.sh` lists our servers)"
        ) from error


def start(process: Planned, folder: Path, log: Path | None) -> None:
    """Start a process in a session of its own, which outlives the shell. ``log`` None: it shares our output."""
    with open(log or os.devnull, "wb") as file:
        process.child = subprocess.Popen(
            process.command, env=process.environment, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=file if log else None, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    started = psutil.Process(process.child.pid).create_time()  # a zombie, too, has one until it is waited for
    process.server = dataclasses.replace(
        process.server, log=str(log) if log else None, pid=process.child.pid, started=started
    )


def wait_until_ready(processes: list[Planned], settings: LaunchSettings) -> None:
    """Wait until every process lists its names, with progress lines.

    Raises:
        LaunchError: A process ended or did not answer in time; the message has the end of its log.
    """
    began = printed = time.monotonic()
    while waiting := [process for process in processes if not process.ready]:
        time.sleep(_POLL_S)
        for process in processes:
            if (status := process.child.poll()) is not None:
                when = "after it was up" if process.ready else "while loading"
                title = process.server.title
                raise LaunchError(
                    f"the server of {title} ended with status {status} {when}.\n{_log_tail(process.server)}"
                )
        waited = time.monotonic() - began
        for process in waiting:
            process.ready = process.server.state(settings.api_key) == "healthy"
            if not process.ready and waited > settings.start_timeout_s:
                raise LaunchError(
                    f"the server of {process.server.title} did not answer within {settings.start_timeout_s:g} s "
                    f"(VLLM_START_TIMEOUT).\n{_log_tail(process.server)}"
                )
        if time.monotonic() - printed > _PROGRESS_S:
            printed = time.monotonic()
            for server in [process.server for process in waiting if process.server.log]:
                line = (_log_lines(server.log) or ["…"])[-1][:120]
                print(f"  {server.title} loading, {waited:.0f} s: {line}", flush=True)


def _log_lines(log: str) -> list[str]:
    text = Path(log).read_text(errors="replace")[-16000:].replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def _log_tail(server: Server) -> str:
    if server.log is None:
        return "Its output is above."
    lines = [f"  | {line}" for line in _log_lines(server.log)[-_LOG_LINES:]]
    return "\n".join([f"End of its log ({server.log}):", *lines])


def launch(environment: Mapping[str, str], foreground: bool) -> int:
    """Start the servers and wait until they answer; in the foreground also until one ends. Returns an exit status."""
    settings = LaunchSettings.from_environment(environment)
    folder = LabelFolder.from_environment(environment)
    folder.path.mkdir(mode=0o700, exist_ok=True)
    label, port = f"label {folder.label!r}", f"port {settings.port}"
    processes: list[Planned] = []
    ready = False
    try:
        with locked(folder.path / "lock", label), locked(folder.path.parent / f"port-{settings.port}.lock", port):
            if running := [server for server in folder.read() if server.alive()]:
                raise LaunchError(
                    f"{label} is in use: {running[0].title} at {running[0].url}. End it with "
                    f"`VLLM_LABEL={folder.label} bash vllm_server/stop.sh`, or choose another VLLM_LABEL"
                )
            engine, models, processes = make_plan(settings, environment)
            for model in models if engine.name == "vllm" else ():  # the transformers engine checks its own
                check_weights(model)
            for process in processes:  # the gateway first: it occupies the public port while models load
                start(process, folder.path, None if foreground else folder.log(process.server.title))
                folder.write([each.server for each in processes if each.child])
            wait_until_ready(processes, settings)
        ready = True
        front = processes[0].server
        print(f"Ready:  {', '.join(front.names)} at {front.url}/v1 (pid {front.pid})")
        for process in processes:
            if process.server.log:
                print(f"Log:    {process.server.log}")
        print(f"Stop:   VLLM_LABEL={folder.label} bash vllm_server/stop.sh", flush=True)
        if not foreground:
            return 0
        while all(process.child.poll() is None for process in processes):
            time.sleep(_POLL_S)
        status = next(status for process in processes if (status := process.child.poll()) is not None)
    except BaseException as error:  # a launch that fails or is interrupted leaves no process behind
        _end(folder, processes, 20.0 if ready else 5.0)
        if ready and isinstance(error, Interrupted):
            print("Stopped", flush=True)
            return 0
        raise
    _end(folder, processes, 20.0)
    return status if status >= 0 else 128 - status


def _end(folder: LabelFolder, processes: list[Planned], grace_period_s: float) -> None:
    started = [process for process in processes if process.child]
    if not started:
        return
    end([process.server for process in started], grace_period_s)
    for process in started:
        process.child.wait()
    folder.remove_ended()


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="launch.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "stay with the servers (containers); signals end them, and all end when one does"
    parser.add_argument("--foreground", action="store_true", help=text)
    arguments = parser.parse_args()
    _on_signals(_interrupt)
    try:
        return launch(os.environ, arguments.foreground)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"launch: interrupted ({error}); nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
