"""Start judge servers and wait until they answer.

With several models or an API key, engines get private loopback ports, and a gateway on VLLM_PORT
sends each request to the server of its model. `bash vllm_server/launch.sh --help` lists the
environment variables.
"""

import argparse
import errno
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from vllm_server.engines import (
    Engine,
    check_weights,
    choose_engine,
    engine_command,
    num_api_servers,
    process_environment,
    reduces_images,
)
from vllm_server.gpus import Place, divide_gpus, visible_gpus
from vllm_server.settings import LaunchError, LaunchSettings, Model, read_models
from vllm_server.state import (
    GATEWAY,
    MARK,
    STATE,
    Server,
    end_servers,
    label_folder,
    locked,
    read_servers,
    write_servers,
)

_POLL_S = 0.25
_PROGRESS_S = 10.0
_LOG_LINES = 40
# Below the ports that the kernel gives to outgoing connections: those could take one while a model
# is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="launch.sh", description=__doc__)
    parser.parse_args()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        launch(os.environ)
        return 0
    except (LaunchError, OSError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"launch: interrupted ({error}); nothing is left running", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: object) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # what follows is not interrupted
    raise KeyboardInterrupt(signal.Signals(number).name)


def launch(environment: Mapping[str, str]) -> None:
    """Start the servers and wait until they answer. Raises LaunchError, OSError."""
    settings = LaunchSettings.from_environment(environment)
    folder = label_folder(environment)
    folder.mkdir(mode=0o700, exist_ok=True)
    label_lock = locked(folder / "lock", f"label {folder.name!r}")
    port_lock = locked(folder.parent / f"port-{settings.port}.lock", f"port {settings.port}")
    children: list[subprocess.Popen] = []
    servers: list[Server] = []
    try:
        with label_lock, port_lock:
            _refuse_running(read_servers(folder), folder, f"label {folder.name!r}")
            _refuse_port(settings, folder.parent)
            servers = plan_servers(settings, environment)
            for server in servers:
                children.append(start(server, folder, environment))
                write_servers(folder, servers[: len(children)])
            wait_until_ready(servers, children, settings)
    except BaseException:
        if children:  # a launch that fails or is interrupted leaves no process behind
            end_servers(folder, servers[: len(children)], 5.0)
        raise
    front = servers[0]
    print(f"Ready:  {', '.join(front.names)} at {front.url}/v1 (pid {front.pid})")
    for server in servers:
        print(f"Log:    {server.log}")
    print(f"Stop:   VLLM_LABEL={folder.name} bash vllm_server/stop.sh", flush=True)


def _refuse_running(servers: Sequence[Server], folder: Path, what: str) -> None:
    """Raises LaunchError, which names what an earlier launch has left running."""
    for server in servers:
        if members := server.members():
            first = members[0]
            started = datetime.fromtimestamp(first.create_time()).isoformat(" ", "seconds")
            raise LaunchError(
                f"{what} is in use: {server.name} at {server.url}, pid {first.pid}, started "
                f"{started}. End it with `VLLM_LABEL={folder.name} bash vllm_server/stop.sh`, or "
                "choose another VLLM_LABEL and VLLM_PORT"
            )


def _refuse_port(settings: LaunchSettings, root: Path) -> None:
    """vLLM would share the port with another server. Raises LaunchError."""
    host = settings.host
    port = settings.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = _listener(port, root) or "another program listens there"
        raise LaunchError(
            f"cannot listen on {host}:{port} ({reason}): choose another VLLM_PORT, or end the "
            "program that uses it"
        ) from error


def _listener(port: int, root: Path) -> str | None:
    """The launch whose server has a port."""
    for state_file in sorted(root.glob(f"*/{STATE}")):
        try:
            servers = read_servers(state_file.parent)
        except LaunchError:
            continue  # `status.sh` reports damaged files
        for server in servers:
            if server.url.endswith(f":{port}") and server.alive():
                label = state_file.parent.name
                return f"{server.name} of label {label!r}, pid {server.pid}, listens there"
    return None


def plan_servers(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Server]:
    """Check models, engine, GPUs and weights, and print what was decided. Raises LaunchError."""
    models = read_models(settings)
    gpus = visible_gpus(environment)
    num_gpus = len(gpus)
    if "CUDA_VISIBLE_DEVICES" not in environment:
        gpus = gpus[: len(models)]  # the rest is for the training
    engine = choose_engine(settings, environment, gpus)
    print(
        f"Engine: {engine.name} {engine.version} ({engine.python}{engine.note}), {len(gpus)} GPUs"
    )
    try:
        places = place_models(engine, settings, models, gpus)
    except LaunchError as error:
        if num_gpus == len(gpus):
            raise
        raise LaunchError(
            f"{error}; CUDA_VISIBLE_DEVICES is not set, so each model gets one of {num_gpus} GPUs: "
            "set it to give the judge more"
        ) from error
    # vLLM's own key protects only some of its routes.
    has_gateway = len(models) > 1 or settings.api_key is not None
    if has_gateway:
        addresses = [(_LOOPBACK, port) for port in _free_ports(len(models))]
    else:
        addresses = [(settings.host, settings.port)]
    servers = []
    for model, place, address in zip(models, places, addresses, strict=True):
        servers.append(_engine_server(engine, settings, model, place, address, len(models)))
        _print_server(servers[-1], model, place, has_gateway)
        if reduces_images(settings, model):
            print(
                f"Note:   {model.name} sees images of at most {settings.max_pixels} pixels, as in "
                f"the judge's training (its own limit: {model.max_pixels}; VLLM_MAX_PIXELS)"
            )
    if num_gpus > len(gpus):
        print(
            f"Note:   Using GPU {','.join(gpus)} of {num_gpus}; set CUDA_VISIBLE_DEVICES to give "
            "the judge others or more"
        )
    used = {gpu for place in places for gpu in place.gpus}
    if unused := [gpu for gpu in gpus if gpu not in used]:
        print(f"Note:   GPUs {','.join(unused)} stay unused")
    if has_gateway:
        print("Gateway in front")
        # First, since it occupies the public port while models load.
        servers.insert(0, _gateway_server(settings, servers))
    sys.stdout.flush()
    if engine.name == "vllm":  # the transformers engine checks its own
        for model in models:
            check_weights(model)
    return servers


def place_models(
    engine: Engine, settings: LaunchSettings, models: Sequence[Model], gpus: Sequence[str]
) -> list[Place]:
    """The GPUs of each model. Raises LaunchError."""
    if engine.name == "vllm" and gpus:
        return divide_gpus(settings, models, gpus)
    if engine.name == "vllm" and (settings.tensor_parallel or settings.replicas):
        raise LaunchError(
            "VLLM_TP and VLLM_REPLICAS are for GPUs, and there is no GPU here; unset them"
        )
    if not gpus:
        return [Place(()) for _ in models]
    # The transformers engine's servers use one GPU each, in turn.
    return [Place((gpus[index % len(gpus)],)) for index in range(len(models))]


def _engine_server(
    engine: Engine,
    settings: LaunchSettings,
    model: Model,
    place: Place,
    address: tuple[str, int],
    num_models: int,
) -> Server:
    api_servers = num_api_servers(settings, num_models, place) if engine.name == "vllm" else 1
    return Server(
        model.name,
        model.path,
        url=_local_url(*address),
        engine=engine.name,
        names=(model.name,),
        gpus=place.gpus,
        command=engine_command(engine, settings, model, address, place, api_servers),
        api_servers=api_servers,
    )


def _print_server(server: Server, model: Model, place: Place, is_private: bool) -> None:
    words = [f"Model:  {model.name} from {model.path}"]
    if place.gpus:
        words.append(f"GPU {','.join(place.gpus)}")
    if place.copies > 1:
        words.append(f"{place.copies} copies")
    if server.api_servers > 1:
        words.append(f"{server.api_servers} API servers (VLLM_API_SERVERS)")
    if is_private:
        words.append(f"private port at {server.url}")
    print(", ".join(words))
    print(f"        {shlex.join(server.command)}")


def _gateway_server(settings: LaunchSettings, engines: Sequence[Server]) -> Server:
    """Its key is in its environment: everybody can read command lines."""
    urls = {name: server.url for server in engines for name in server.names}
    command = [sys.executable, "-m", "vllm_server.gateway"]
    command += ["--host", settings.host, "--port", str(settings.port)]
    command += ["--max-body-mb", str(settings.max_body_mb)]
    command += [f"--upstream={name}={url}" for name, url in urls.items()]
    url = _local_url(settings.host, settings.port)
    return Server(
        name=GATEWAY,
        model="",
        url=url,
        engine=GATEWAY,
        names=tuple(urls),
        gpus=(),
        command=command,
    )


def _local_url(host: str, port: int) -> str:
    host = {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _free_ports(count: int) -> list[int]:
    connections = psutil.net_connections("tcp")
    used = {connection.laddr.port for connection in connections if connection.laddr}
    return random.sample([port for port in _PRIVATE_PORTS if port not in used], count)


def start(server: Server, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a server in a session of its own, which outlives the shell.

    Its process and its log are noted in it.
    """
    server.log = str(folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', server.name)}.log")
    server.mark = uuid.uuid4().hex
    variables = process_environment(server.engine, server.gpus, environment, server.api_servers)
    # vLLM's processes write their titles over their environment, where stop.sh looks for the mark,
    # unless SPT_NOENV.
    variables |= {MARK: server.mark, "SPT_NOENV": "1"}
    with open(server.log, "wb") as file:
        child = subprocess.Popen(
            server.command,
            env=variables,
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
    servers: list[Server], children: list[subprocess.Popen], settings: LaunchSettings
) -> None:
    """Wait until every server lists its names, with progress lines.

    Raises LaunchError with the end of a log.
    """
    began = time.monotonic()
    printed = began
    waiting = list(servers)
    while waiting:
        time.sleep(_POLL_S)
        for server, child in zip(servers, children, strict=True):
            status = child.poll()
            if status is not None:
                raise LaunchError(
                    f"the server of {server.name} ended with status {status}.\n{_log_tail(server)}"
                )
        waited = time.monotonic() - began
        waiting = [server for server in waiting if server.state(settings.api_key) != "healthy"]
        if waiting and waited > settings.start_timeout_s:
            raise LaunchError(
                f"the server of {waiting[0].name} did not answer within "
                f"{settings.start_timeout_s:g} s (VLLM_START_TIMEOUT).\n{_log_tail(waiting[0])}"
            )
        if time.monotonic() - printed > _PROGRESS_S:
            printed = time.monotonic()
            for server in waiting:
                if server.engine == GATEWAY:
                    continue  # it waits for the others
                print(f"  {server.name} loading, {waited:.0f} s: {_progress(server)}", flush=True)


def _progress(server: Server) -> str:
    """The last line of a server's log; before it has one, what shows that the server works."""
    if lines := _log_lines(server):
        return lines[-1][:120]
    seconds = 0.0
    for process in server.members():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return f"importing its libraries, nothing in its log yet ({seconds:.0f} s of processor time)"


def _log_lines(server: Server) -> list[str]:
    text = Path(server.log).read_text(errors="replace")[-16000:].replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def _log_tail(server: Server) -> str:
    lines = _log_lines(server)[-_LOG_LINES:]
    return "\n  | ".join([f"End of its log ({server.log}):", *lines])


if __name__ == "__main__":
    sys.exit(main())
