"""Start judge servers and wait until they answer.

With several models or an API key, engines get private loopback ports, and a gateway on VLLM_PORT
sends each request to the server of its model. `bash vllm_server/launch.sh --help` lists the
environment variables.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from PIL import Image

from paco_judge import transport
from paco_judge.compiler import missing_for_compilation
from paco_judge.errors import UserError, run_command
from paco_judge.files import locked
from paco_judge.images import data_url
from paco_judge.questions import build_messages, theme_question
from vllm_server.engines import (
    LaunchSettings,
    choose_engine,
    divide_gpus,
    engine_command,
    process_environment,
    read_model,
    visible_gpus,
)
from vllm_server.servers import (
    GATEWAY,
    Server,
    all_servers,
    end_servers,
    label_folder,
    write_servers,
)

_POLL_S = 0.25
_PROGRESS_S = 10.0
_OTHER_LAUNCH_S = 120.0  # for another launch to start its servers
_LOG_LINES = 40
# Below the ports that the kernel gives to outgoing connections: those could take one while a model
# is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """The command; returns its exit status."""
    argparse.ArgumentParser(prog="launch.sh", description=__doc__).parse_args()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    return run_command(lambda: launch(os.environ), OSError)


def _interrupt(number: int, frame: object) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # what follows is not interrupted
    raise KeyboardInterrupt


def launch(environment: Mapping[str, str]) -> None:
    """Start the servers and wait until they answer. Raises UserError, OSError.

    A launch that fails or is interrupted leaves no process behind.
    """
    settings = LaunchSettings.from_environment(environment)
    folder = label_folder(environment)
    folder.mkdir(exist_ok=True)
    children: list[subprocess.Popen] = []
    servers: list[Server] = []
    try:
        # vLLM shares its port with other servers: two launches must not take it for free.
        with locked(folder.parent, _OTHER_LAUNCH_S):
            _refuse_running(settings, folder)
            _refuse_port(settings.host, settings.port)
            servers = plan_servers(settings, environment)
            for server in servers:
                children.append(start(server, folder, environment))
                write_servers(folder, servers[: len(children)])
        wait_until_ready(servers, children, settings)
    except BaseException:
        if children:
            end_servers(folder, servers[: len(children)], 5.0)
        raise
    front = servers[0]
    print(f"Ready:  {', '.join(front.names)} at {front.url}/v1 (pid {front.pid})")
    for server in servers:
        print(f"Log:    {server.log}")
    print(f"Stop:   VLLM_LABEL={folder.name} bash vllm_server/stop.sh", flush=True)


def _refuse_running(settings: LaunchSettings, folder: Path) -> None:
    """Raises UserError: A server of an earlier launch still has the label or the port."""
    for label, servers in all_servers(folder.parent).items():
        for server in servers:
            has_label = label == folder.name
            has_port = server.url.endswith(f":{settings.port}")
            if (has_label or has_port) and (members := server.members()):
                what = f"label {label!r}" if has_label else f"port {settings.port}"
                raise UserError(
                    f"{what} is in use: {server.name} at {server.url} of label {label!r}, pid "
                    f"{members[0]}. End it with `VLLM_LABEL={label} bash vllm_server/stop.sh`, or "
                    "choose another VLLM_LABEL and VLLM_PORT"
                )


def _refuse_port(host: str, port: int) -> None:
    """Raises UserError: We cannot listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise UserError(
            f"VLLM_HOST and VLLM_PORT: cannot listen on {host}:{port}: {error}"
        ) from error


def plan_servers(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Server]:
    """Read the models, choose engine and GPUs, and print what was decided. Raises UserError."""
    models = [read_model(name, path) for name, path in settings.models]
    num_needed = len(models) * settings.tensor_parallel * (settings.replicas or 1)
    gpus = visible_gpus(environment, num_needed)
    engine = choose_engine(settings, environment, gpus)
    print(f"Engine: {engine.name} ({engine.python}{engine.note}), {len(gpus)} GPUs")
    if engine.name == "vllm" and gpus and (problem := missing_for_compilation(engine.include)):
        raise UserError(problem)
    places = divide_gpus(settings, engine.name, len(models), gpus)
    # vLLM's own key protects only some of its routes.
    has_gateway = len(models) > 1 or settings.api_key is not None
    addresses = [(settings.host, settings.port)]
    if has_gateway:
        addresses = [(_LOOPBACK, port) for port in _free_ports(len(models))]
    servers = []
    for model, place, address in zip(models, places, addresses, strict=True):
        command = engine_command(engine, settings, model, place, address)
        url = _local_url(*address)
        names = [model.name]
        servers.append(Server(model.name, url, engine.name, names, list(place.gpus), command))
        print(f"Model:  {model.name}, GPU {','.join(place.gpus) or 'none'}, at {url}")
        print(f"        {shlex.join(command)}")
    if has_gateway:
        # First, since it occupies the public port while models load.
        servers.insert(0, _gateway_server(settings, servers))
    sys.stdout.flush()
    return servers


def _gateway_server(settings: LaunchSettings, engines: Sequence[Server]) -> Server:
    """Its key is in its environment: everybody can read command lines."""
    command = [sys.executable, "-m", "vllm_server.gateway"]
    command += ["--host", settings.host, "--port", str(settings.port)]
    command += [f"--upstream={server.name}={server.url}" for server in engines]
    url = _local_url(settings.host, settings.port)
    names = [server.name for server in engines]
    return Server(GATEWAY, url, GATEWAY, names, [], command)


def _local_url(host: str, port: int) -> str:
    of_all_addresses = {"0.0.0.0": _LOOPBACK, "::": "::1"}
    return transport.url_of(of_all_addresses.get(host, host), port)


def _free_ports(count: int) -> list[int]:
    connections = psutil.net_connections("tcp")
    used = {connection.laddr.port for connection in connections if connection.laddr}
    return random.sample([port for port in _PRIVATE_PORTS if port not in used], count)


def start(server: Server, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a server in a session of its own, which outlives the shell.

    Its process and its log are noted in it.
    """
    server.log = str(folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', server.name)}.log")
    with open(server.log, "wb") as file:
        child = subprocess.Popen(
            server.command,
            env=process_environment(server.engine, server.gpus, environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server.pid = child.pid
    # A zombie, too, has a start time until it is waited for.
    server.started = psutil.Process(child.pid).create_time()
    return child


def wait_until_ready(
    servers: Sequence[Server], children: Sequence[subprocess.Popen], settings: LaunchSettings
) -> None:
    """Wait until every server lists its names, with progress lines, and every model answers.

    Raises UserError with the end of a log.
    """
    began = time.monotonic()
    printed = began
    waiting = list(servers)
    while waiting:
        time.sleep(_POLL_S)
        for server, child in zip(servers, children, strict=True):
            status = child.poll()
            if status is not None:
                raise UserError(
                    f"the server of {server.name} ended with status {status}.\n{_log_tail(server)}"
                )
        waited = time.monotonic() - began
        waiting = [server for server in waiting if server.state(settings.api_key) != "healthy"]
        if waiting and waited > settings.start_timeout_s:
            raise UserError(
                f"the server of {waiting[0].name} did not answer within "
                f"{settings.start_timeout_s:g} s (VLLM_START_TIMEOUT).\n{_log_tail(waiting[0])}"
            )
        if time.monotonic() - printed > _PROGRESS_S:
            printed = time.monotonic()
            for server in waiting:
                if server.engine != GATEWAY:  # it waits for the others
                    lines = _log_lines(server) or ["nothing in its log yet"]
                    print(f"  {server.name} loading, {waited:.0f} s: {lines[-1][:120]}", flush=True)
    for server in servers:
        if server.engine != GATEWAY:
            _ask_first_question(servers[0].url, server, settings)


def _ask_first_question(url: str, server: Server, settings: LaunchSettings) -> None:
    """Ask a model about two images: it may be listed without answering, and is slow at first.

    Once: an engine that ends on the question is not waited for. Raises UserError with the end of
    its log.
    """
    images = [data_url(Image.new("RGB", (64, 64), color)) for color in ("red", "blue")]
    messages = build_messages(images, theme_question("a square"))
    body = json.dumps({"model": server.name, "messages": messages, "max_tokens": 1}).encode()
    headers = transport.json_headers(settings.api_key)
    deadline = time.monotonic() + settings.start_timeout_s
    address = f"{url}/v1/chat/completions"
    try:
        transport.run(transport.request("POST", address, headers, deadline, body))
    except transport.NoAnswer as error:
        raise UserError(
            f"{server.name} does not answer a question about two images: {error}\n"
            f"{_log_tail(server)}"
        ) from error


def _log_lines(server: Server) -> list[str]:
    lines = Path(server.log).read_text(errors="replace")[-16000:].splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def _log_tail(server: Server) -> str:
    lines = _log_lines(server)[-_LOG_LINES:]
    return "\n  | ".join([f"End of its log ({server.log}):", *lines])


if __name__ == "__main__":
    sys.exit(main())
