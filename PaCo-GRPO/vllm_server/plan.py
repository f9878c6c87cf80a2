"""The processes of a launch: which has which model, port, GPUs and command line. Checked before anything starts."""

import dataclasses
import errno
import random
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_server.engines import (
    Engine,
    choose_engine,
    engine_command,
    engine_environment,
    gateway_command,
    own_environment,
    own_interpreter,
    resolve_heads,
)
from vllm_server.gpus import divide_gpus, smallest_memory, smallest_parallel_size, visible_gpus
from vllm_server.models import Model, changes_vision, read_models, weight_bytes
from vllm_server.processes import port_users
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import GATEWAY, Server

# Below the ports that the kernel gives to outgoing connections: those could take one while a model is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
# All of them come with vLLM.
_GATEWAY_NEEDS = ("fastapi", "uvicorn", "uvloop", "httptools", "aiohttp", "prometheus_client")


@dataclass
class PlannedProcess:
    """A process of a launch; ``child`` is set when it was started, ``ready`` when it serves its names."""

    server: Server
    command: list[str]
    environment: dict[str, str]
    timeout_s: float  # until it must serve
    child: subprocess.Popen | None = None
    ready: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a launch: the gateway first, if there is one."""

    engine: Engine
    gpus: tuple[str, ...]
    models: list[Model]
    processes: list[PlannedProcess]
    copies: int = 1  # inside one vLLM
    notes: tuple[str, ...] = ()  # what was chosen, and why

    @property
    def gateway(self) -> bool:
        """Whether a gateway stands in front of the engines."""
        return self.processes[0].server.engine == GATEWAY


def make_plan(settings: LaunchSettings, environment: Mapping[str, str]) -> LaunchPlan:
    """Checks models, port, engine and GPUs, and decides. Raises LaunchError."""
    models = read_models(settings)
    _check_port(settings.host, settings.port)
    gpus = visible_gpus(environment)
    engine = choose_engine(settings, environment, gpus)
    for adapter in settings.adapters if engine.name == "vllm" else ():
        if changes_vision(adapter):
            raise LaunchError(
                f"VLLM_LORA: {adapter.name} changes the vision tower too, which vLLM would silently ignore; merge it "
                "(`paco-reward export`), or use VLLM_ENGINE=transformers"
            )
    # vLLM protects only some of its routes with its key, hence the gateway.
    gateway = settings.gateway == "always" or len(models) > 1 or settings.api_key is not None
    settings, notes = _choose_copies(engine, settings, models, gpus, environment)
    copies = settings.replicas[0]  # inside one vLLM, which then needs no gateway
    if copies > 1 and (gateway or engine.name != "vllm" or not gpus):
        gateway, copies = True, 1
    places = _divide(engine, settings, models, gpus)
    if copies > 1:
        places = [[tuple(gpu for place in places[0] for gpu in place)]]
    ports = iter(free_ports(sum(settings.replicas)) if gateway else [settings.port])
    processes = []
    for model, own_places, timeout_s in zip(models, places, settings.start_timeout_s, strict=True):
        for replica, place in enumerate(own_places, start=1):
            server = Server(
                title=model.name if replica == 1 else f"{model.name}-{replica}",
                name=model.name,
                model=model.path,
                host=_LOOPBACK if gateway else settings.host,
                port=next(ports),
                engine=engine.name,
                names=model.names,
                gpus=place,
            )
            command = engine_command(engine, settings, model, server, copies)
            variables = engine_environment(engine, server, environment)
            processes.append(PlannedProcess(server, command, variables, timeout_s))
    if gateway:
        names = tuple(name for model in models for name in model.names)
        front = Server(GATEWAY, GATEWAY, "", settings.host, settings.port, GATEWAY, names=names)
        python, _ = own_interpreter("the gateway", environment, *_GATEWAY_NEEDS)
        command = gateway_command(python, settings, [process.server for process in processes])
        timeout_s = max(settings.start_timeout_s) + 60
        processes.insert(0, PlannedProcess(front, command, own_environment(environment), timeout_s))
    return LaunchPlan(engine, gpus, models, processes, copies, notes)


def free_ports(count: int) -> list[int]:
    """Different loopback ports that are free now. Raises LaunchError when there are too few."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PRIVATE_PORTS, len(_PRIVATE_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise LaunchError(f"no {count} free ports from {_PRIVATE_PORTS[0]} to {_PRIVATE_PORTS[-1]} on {_LOOPBACK}")


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        user = port_users(host, port)[1] if error.errno == errno.EADDRINUSE else None
        raise LaunchError(
            f"cannot listen on {host}:{port} ({f'{user} listens there' if user else error.strerror}): choose another "
            "VLLM_PORT, or end the program that uses it (`bash vllm_server/status.sh` lists our servers)"
        ) from error


def _choose_copies(
    engine: Engine,
    settings: LaunchSettings,
    models: list[Model],
    gpus: tuple[str, ...],
    environment: Mapping[str, str],
) -> tuple[LaunchSettings, tuple[str, ...]]:
    """Where neither VLLM_TP nor VLLM_REPLICAS is set: copies on as few GPUs as they fit, on all GPUs; and why."""
    chosen = environment.get("VLLM_TP") or environment.get("VLLM_REPLICAS")
    if chosen or engine.name != "vllm" or not len(models) <= len(gpus) > 1:
        return settings, ()
    memory, sizes = smallest_memory(gpus), [weight_bytes(model.path) for model in models]
    if memory is None or None in sizes:
        return settings, ("the size of the model or of a GPU is unknown here, so each model gets one copy on its GPUs",)
    parallel, replicas, notes = [], [], []
    for number, (model, size) in enumerate(zip(models, sizes, strict=True)):
        share = len(gpus) // len(models) + (number < len(gpus) % len(models))
        parallel.append(smallest_parallel_size(share, model.config, size, memory, settings.gpu_memory_utilization))
        replicas.append(share // parallel[-1])
        notes.append(
            f"{model.name}: VLLM_TP={parallel[-1]}, VLLM_REPLICAS={replicas[-1]}, because its weights have "
            f"{size / 2**30:.1f} GiB and a GPU {memory / 2**30:.0f}"
        )
    return dataclasses.replace(settings, tensor_parallel=tuple(parallel), replicas=tuple(replicas)), tuple(notes)


def _divide(engine: Engine, settings: LaunchSettings, models: list[Model], gpus: tuple[str, ...]) -> list[list[tuple]]:
    """For each model, for each replica, its GPUs."""
    if engine.name == "vllm" and gpus:
        names = [model.name for model in models]
        configs = [
            model.config | resolve_heads(engine, model.path)
            if len(gpus) > 1 and size is None and "num_attention_heads" not in model.config
            else model.config
            for model, size in zip(models, settings.tensor_parallel, strict=True)
        ]
        return divide_gpus(gpus, names, configs, settings.tensor_parallel, settings.replicas)
    if any(size and size > 1 for size in settings.tensor_parallel):
        where = "the transformers engine uses one GPU" if gpus else "there is no GPU"
        raise LaunchError(f"VLLM_TP is for vLLM on GPUs, and {where}; leave it unset")
    # Servers of the transformers engine alternate over the GPUs; several fit on one if their weights do.
    places = iter((gpus[i % len(gpus)],) if gpus else () for i in range(sum(settings.replicas)))
    return [[next(places) for _ in range(copies)] for copies in settings.replicas]
