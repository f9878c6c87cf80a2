"""The environment variables of a launch, checked before anything is started."""

import re
import reprlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LABEL = re.compile(r"(?=.*[^.])[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9./:@+_-]{0,199}")
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LaunchError(Exception):
    """A launch, stop or status that is not possible; the message names the cause and what to do."""


@dataclass(frozen=True)
class Weights:
    """A model (a local folder, absolute, or a hub name) or a LoRA adapter (a local folder), and its served name."""

    path: str
    name: str


def _listed(environment: Mapping[str, str], variable: str) -> list[str]:
    return [part.strip() for part in environment.get(variable, "").split(",") if part.strip()]


def _absolute(path: str) -> str:
    """Servers run in another working folder."""
    return str(Path(path).expanduser().resolve())


def _models(environment: Mapping[str, str]) -> tuple[Weights, ...]:
    paths = _listed(environment, "VLLM_MODEL_PATHS")
    if not paths:
        raise LaunchError(
            "VLLM_MODEL_PATHS is empty: name the model to serve, for example "
            "VLLM_MODEL_PATHS=/models/PaCo-Reward-7B VLLM_MODEL_NAMES=PaCo-Reward-7B"
        )
    names = _listed(environment, "VLLM_MODEL_NAMES") or [Path(path).name for path in paths]
    if len(paths) != len(names):
        raise LaunchError(
            f"VLLM_MODEL_PATHS has {len(paths)} entries and VLLM_MODEL_NAMES {len(names)}: give one per model"
        )
    paths = [path if HUB_NAME.fullmatch(path) and not Path(path).exists() else _absolute(path) for path in paths]
    return tuple(map(Weights, paths, names))


def _adapters(environment: Mapping[str, str]) -> tuple[Weights, ...]:
    adapters = []
    for entry in _listed(environment, "VLLM_LORA"):
        name, _, path = (part.strip() for part in entry.partition("="))
        if not (name and path):
            raise LaunchError(f"VLLM_LORA must be name=path (several separated by commas), got {entry!r}")
        adapters.append(Weights(_absolute(path), name))
    return tuple(adapters)


def label_from(environment: Mapping[str, str]) -> str:
    """VLLM_LABEL, safe as a folder name. Raises LaunchError."""
    label = environment.get("VLLM_LABEL") or "default"
    if not _LABEL.fullmatch(label):
        raise LaunchError(
            f"VLLM_LABEL must be 1 to 64 letters, digits, '.', '_' or '-' (and not only dots), got {label!r}"
        )
    return label


def _api_key(environment: Mapping[str, str]) -> str | None:
    key = environment.get("VLLM_API_KEY") or None
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise LaunchError("VLLM_API_KEY must be printable ASCII without spaces: it is sent in a header")
    return key


def _extra_args(environment: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(environment.get("VLLM_EXTRA_ARGS", "")))
    except ValueError as error:
        raise LaunchError(f"VLLM_EXTRA_ARGS cannot be split into words as a shell would: {error}") from error


def _media_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    hosts = _listed(environment, "VLLM_MEDIA_HOSTS")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host):
            raise LaunchError(f"VLLM_MEDIA_HOSTS must be host names separated by commas, got {host!r}")
    return tuple(hosts)


def _read(read: Callable[[Mapping[str, str]], Any]) -> Any:
    """A field that ``read`` takes from the environment."""
    return field(metadata={"read": read})


def _choice(variable: str, *known: str) -> Any:
    """A field that is one of ``known``, by default the first."""

    def read(environment: Mapping[str, str]) -> str:
        value = environment.get(variable) or known[0]
        if value not in known:
            raise LaunchError(f"{variable} must be one of {', '.join(known)}, got {value!r}")
        return value

    return _read(read)


def _number(variable: str, default: float | None, low: float, high: float, kind: type = int, per_model: bool = False):
    """A number from ``low`` to ``high``. ``per_model``: a tuple of one for each model; a single one is for all."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            whole = "whole " if kind is int else ""
            raise LaunchError(f"{variable} must be a {whole}number, got {reprlib.repr(text)}") from error
        if not low <= value <= high:
            raise LaunchError(f"{variable} must lie between {low} and {high}, got {reprlib.repr(text)}")
        return value

    def read(environment: Mapping[str, str]):
        if not per_model:
            text = environment.get(variable)
            return parse(text) if text else default
        values = tuple(map(parse, _listed(environment, variable))) or (default,)
        count = len(_listed(environment, "VLLM_MODEL_PATHS"))
        if len(values) not in (1, count):
            raise LaunchError(f"{variable} has {len(values)} entries for {count} models: give one, or one per model")
        return values * count if len(values) == 1 else values

    return _read(read)


@dataclass(frozen=True)
class LaunchSettings:
    """What to launch. Not yet checked against the machine."""

    models: tuple[Weights, ...] = _read(_models)
    adapters: tuple[Weights, ...] = _read(_adapters)
    host: str = _read(lambda environment: environment.get("VLLM_HOST") or "127.0.0.1")
    port: int = _number("VLLM_PORT", 8000, 1, 65535)
    label: str = _read(label_from)
    api_key: str | None = _read(_api_key)
    engine: str = _choice("VLLM_ENGINE", "auto", "vllm", "transformers")
    # None: chosen by size, memory and number of heads
    tensor_parallel: tuple[int | None, ...] = _number("VLLM_TP", None, 1, 1024, per_model=True)
    replicas: tuple[int | None, ...] = _number("VLLM_REPLICAS", None, 1, 1024, per_model=True)
    start_timeout_s: float = _number("VLLM_START_TIMEOUT", 1800.0, 1, 86400, float)
    gpu_memory_utilization: float = _number("GPU_MEMORY_UTILIZATION", 0.85, 0.01, 1.0, float)
    max_model_len: int = _number("MAX_MODEL_LEN", 8192, 16, 1 << 24)
    # In one request. build-dataset ranks 5 by default: a reference and --candidates.
    max_images: int = _number("VLLM_MAX_IMAGES", 16, 1, 1024)
    # From which vLLM may fetch images; nobody by default.
    media_hosts: tuple[str, ...] = _read(_media_hosts)
    extra_args: tuple[str, ...] = _read(_extra_args)
    max_body_mb: float = _number("VLLM_MAX_BODY_MB", 32.0, 0.001, 4096, float)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
        settings = cls(**{each.name: each.metadata["read"](environment) for each in fields(cls)})
        names = [weights.name for weights in (*settings.models, *settings.adapters)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise LaunchError(f"a served name must be 1 to 200 letters, digits or ./:@+_-, got {name!r}")
        if len(set(names)) != len(names):
            raise LaunchError(f"VLLM_MODEL_NAMES and VLLM_LORA contain a name twice: {', '.join(names)}")
        return settings


def local_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on ``host``."""
    host = _LOCAL_HOSTS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
