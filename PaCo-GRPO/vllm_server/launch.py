"""Start judge servers and wait until they answer.

With several models or an API key, engines get private loopback ports, and a gateway on VLLM_PORT sends each request to
the server of its model.

README.md beside this file describes the environment variables: VLLM_MODEL_PATHS, VLLM_MODEL_NAMES, VLLM_PORT, …
"""

import argparse
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from vllm_server.engines import check_weights, choose_engine, engine_command, process_environment
from vllm_server.plan import LaunchError, LaunchSettings, divide_gpus, read_models, visible_gpus
from vllm_server.state import GATEWAY, Server, end, label_folder, locked, read, write

_POLL_S, _PROGRESS_S, _LOG_LINES = 0.25, 10.0, 40
# Below the ports that the kernel gives to outgoing connections: those could take one while a model is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: object) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # what follows is not interrupted
    raise KeyboardInterrupt(signal.Signals(number).name)


def make_plan(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Server]:
    """Check models, port, engine, GPUs and weights; print what was decided. Raises LaunchError."""
    models = read_models(settings)
    _check_port(settings.host, settings.port)
    gpus, notes = visible_gpus(environment), []
    if "CUDA_VISIBLE_DEVICES" not in environment and len(gpus) > len(models):
        used = ",".join(gpus[: len(models)])
        notes.append(
            f"Using GPU {used} of {len(gpus)}; set CUDA_VISIBLE_DEVICES to give the judge others or more"
        )
        gpus = gpus[: len(models)]
    engine = choose_engine(settings, environment, gpus)
    if engine.name == "vllm" and gpus:
        places = divide_gpus(settings, models, gpus)
        if unused := [gpu for gpu in gpus if not any(gpu in own for own, _ in places)]:
            notes.append(f"GPUs {','.join(unused)} stay unused")
    elif engine.name == "vllm" and (settings.tensor_parallel or settings.replicas):
        raise LaunchError(
            "VLLM_TP and VLLM_REPLICAS are for GPUs, and there is no GPU here; unset them"
        )
    else:  # the transformers engine's servers alternate over the GPUs
        places = [((gpus[i % len(gpus)],) if gpus else (), 1) for i in range(len(models))]
    gateway = (
        len(models) > 1 or settings.api_key is not None
    )  # vLLM's own key protects only some of its routes
    host, ports = (
        (_LOOPBACK, _free_ports(len(models))) if gateway else (settings.host, [settings.port])
    )
    print(
        f"Engine: {engine.name} {engine.version} ({engine.python}{engine.note}), {len(gpus)} GPUs"
    )
    servers = []
    for model, (own, copies), port in zip(models, places, ports, strict=True):
        url, command = (
            _local_url(host, port),
            engine_command(engine, settings, model, (host, port), own, copies),
        )
        servers.append(Server(model.name, model.path, url, engine.name, model.names, own, command))
        place = f", GPU {','.join(own)}" * bool(own) + f", {copies} copies" * (copies > 1)
        print(
            f"Model:  {model.name} from {model.path}{place}{f', private port at {url}' * gateway}"
        )
        for name, path in model.adapters.items():
            print(f"        {name} (LoRA) from {path}")
    for note in notes:
        print(f"Note:   {note}")
    if gateway:
        print("Gateway in front")
        urls = {name: server.url for server in servers for name in server.names}
        command = [
            sys.executable,
            "-m",
            "vllm_server.gateway",
            "--host",
            settings.host,
            "--port",
            str(settings.port),
        ]
        command += [
            "--max-body-mb",
            str(settings.max_body_mb),
        ]  # no key: everybody can read command lines
        command += [f"--upstream={name}={url}" for name, url in urls.items()]
        url = _local_url(settings.host, settings.port)
        # First, since it occupies the public port while models load.
        servers.insert(0, Server(GATEWAY, "", url, GATEWAY, tuple(urls), (), command))
    sys.stdout.flush()
    for model in models if engine.name == "vllm" else ():  # the transformers engine checks its own
        check_weights(model)
    return servers


def _local_url(host: str, port: int) -> str:
    host = {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _free_ports(count: int) -> list[int]:
    used = {
        connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr
    }
    return random.sample([port for port in _PRIVATE_PORTS if port not in used], count)


def _check_port(host: str, port: int) -> None:
    """vLLM would share the port with another server. Raises LaunchError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = (
            "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        )
        raise LaunchError(
            f"cannot listen on {host}:{port} ({reason}): choose another VLLM_PORT, or end the program that uses it"
        ) from error


def start(server: Server, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a server in a session of its own, which outlives the shell, and note its process and its log in it."""
    server.log = str(folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', server.name)}.log")
    with open(server.log, "wb") as file:
        child = subprocess.Popen(
            server.command, env=process_environment(server.engine, server.gpus, environment), cwd=folder,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server.pid = child.pid
    server.started = psutil.Process(
        child.pid
    ).create_time()  # a zombie, too, has one until it is waited for
    return child


def wait_until_ready(
    servers: list[Server], children: list[subprocess.Popen], settings: LaunchSettings
) -> None:
    """Wait until every server lists its names, with progress lines. Raises LaunchError with the end of a log."""
    began = printed = time.monotonic()
    waiting = list(servers)
    while waiting:
        time.sleep(_POLL_S)
        for server, child in zip(servers, children, strict=True):
            if (status := child.poll()) is not None:
                raise LaunchError(
                    f"the server of {server.name} ended with status {status}.\n{_log_tail(server)}"
                )
        waited = time.monotonic() - began
        waiting = [server for server in waiting if server.state(settings.api_key) != "healthy"]
        if waiting and waited > settings.start_timeout_s:
            raise LaunchError(
                f"the server of {waiting[0].name} did not answer within {settings.start_timeout_s:g} s "
                f"(VLLM_START_TIMEOUT).\n{_log_tail(waiting[0])}"
            )
        if time.monotonic() - printed > _PROGRESS_S:
            printed = time.monotonic()
            for server in waiting:
                print(
                    f"  {server.name} loading, {waited:.0f} s: {_log_lines(server)[-1][:120]}",
                    flush=True,
                )


def _log_lines(server: Server) -> list[str]:
    text = Path(server.log).read_text(errors="replace")[-16000:].replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()] or ["…"]


def _log_tail(server: Server) -> str:
    return "\n  | ".join([f"End of its log ({server.log}):", *_log_lines(server)[-_LOG_LINES:]])


def launch(environment: Mapping[str, str]) -> None:
    """Start the servers and wait until they answer. Raises LaunchError."""
    settings, folder = LaunchSettings.from_environment(environment), label_folder(environment)
    folder.mkdir(mode=0o700, exist_ok=True)
    label, port = f"label {folder.name!r}", f"port {settings.port}"
    children: list[subprocess.Popen] = []
    try:
        with (
            locked(folder / "lock", label),
            locked(folder.parent / f"port-{settings.port}.lock", port),
        ):
            if running := [server for server in read(folder) if server.alive()]:
                raise LaunchError(
                    f"{label} is in use: {running[0].name} at {running[0].url}. End it with "
                    f"`VLLM_LABEL={folder.name} bash vllm_server/stop.sh`, or choose another VLLM_LABEL"
                )
            servers = make_plan(settings, environment)
            for server in servers:
                children.append(start(server, folder, environment))
                write(folder, servers[: len(children)])
            wait_until_ready(servers, children, settings)
    except BaseException:
        if children:  # a launch that fails or is interrupted leaves no process behind
            end(folder, servers[: len(children)], 5.0)
        raise
    print(f"Ready:  {', '.join(servers[0].names)} at {servers[0].url}/v1 (pid {servers[0].pid})")
    for server in servers:
        print(f"Log:    {server.log}")
    print(f"Stop:   VLLM_LABEL={folder.name} bash vllm_server/stop.sh", flush=True)


def main() -> int:
    argparse.ArgumentParser(
        prog="launch.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    try:
        launch(os.environ)
        return 0
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"launch: interrupted ({error}); nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
