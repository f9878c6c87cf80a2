"""What a launch is asked to do: environment variables of the guide, checked before anything is started."""

import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("auto", "vllm", "transformers")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9./:@+_-]{0,199}")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LaunchError(Exception):
    """A launch, stop or status that cannot be done; the message names the thing and the remedy."""


@dataclass(frozen=True)
class ServedModel:
    """One model: a local folder (absolute) or a hub name, and the name it is asked for by."""

    path: str
    name: str


@dataclass(frozen=True)
class ServedAdapter:
    """A LoRA adapter that is served on its base, unmerged: a local folder (absolute) and its name."""

    path: str
    name: str


@dataclass(frozen=True)
class GatewayLimits:
    """What the gateway allows, where there is one. ``always``: also in front of a single server."""

    always: bool = False
    workers: int = 1
    max_concurrent: int = 1024
    max_body_mb: float = 32.0
    request_timeout_s: float = 600.0


@dataclass(frozen=True)
class LaunchSettings:
    """The environment variables of a launch, checked in form (not yet against the machine).

    Per model, in the order of ``models``: ``tensor_parallel`` (None: chosen), ``replicas``, ``start_timeout_s``.
    """

    models: tuple[ServedModel, ...]
    adapters: tuple[ServedAdapter, ...]
    host: str
    port: int
    label: str
    engine: str
    tensor_parallel: tuple[int | None, ...]
    replicas: tuple[int, ...]
    gpu_memory_utilization: float
    max_model_len: int
    start_timeout_s: tuple[float, ...]
    extra_args: tuple[str, ...]
    api_key: str | None
    gateway: GatewayLimits

    @property
    def url(self) -> str:
        """Where this machine reaches the public port."""
        return local_url(self.host, self.port)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
        models, adapters = _models(environment), _adapters(environment)
        names = [entry.name for entry in (*models, *adapters)]
        if len(set(names)) != len(names):
            raise LaunchError(f"VLLM_MODEL_NAMES and VLLM_LORA have a name twice: {', '.join(names)}")
        count = len(models)
        label = label_from(environment)
        engine = _choice(environment, "VLLM_ENGINE", ENGINES)
        return cls(
            models=models,
            adapters=adapters,
            host=environment.get("VLLM_HOST") or "127.0.0.1",
            port=_whole(environment, "VLLM_PORT", 8000, 1, 65535),
            label=label,
            engine=engine,
            tensor_parallel=_per_model(environment, "VLLM_TP", None, count, 1, 1024, whole=True),
            replicas=_per_model(environment, "VLLM_REPLICAS", 1, count, 1, 1024, whole=True),
            gpu_memory_utilization=_number(environment, "GPU_MEMORY_UTILIZATION", 0.85, 0.01, 1.0),
            max_model_len=_whole(environment, "MAX_MODEL_LEN", 8192, 16, 1 << 24),
            start_timeout_s=_per_model(environment, "VLLM_START_TIMEOUT", 1800, count, 1, 86400),
            extra_args=_words(environment, "VLLM_EXTRA_ARGS"),
            api_key=_api_key(environment),
            gateway=GatewayLimits(
                always=_choice(environment, "VLLM_GATEWAY", ("auto", "always")) == "always",
                workers=_whole(environment, "VLLM_GATEWAY_WORKERS", 1, 1, 256),
                max_concurrent=_whole(environment, "VLLM_MAX_CONCURRENT", 1024, 1, 1 << 20),
                max_body_mb=_number(environment, "VLLM_MAX_BODY_MB", 32, 0.001, 4096),
                request_timeout_s=_number(environment, "VLLM_REQUEST_TIMEOUT", 600, 0.1, 86400),
            ),
        )


def local_url(host: str, port: int) -> str:
    """The URL by which this machine reaches a server that listens on ``host``."""
    host = _LOCAL_HOSTS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def label_from(environment: Mapping[str, str]) -> str:
    """VLLM_LABEL, safe as a folder name. Raises LaunchError."""
    label = environment.get("VLLM_LABEL") or "default"
    if not _LABEL.fullmatch(label) or label.strip(".") == "":
        raise LaunchError(
            f"VLLM_LABEL must be 1 to 64 letters, digits, '.', '_' or '-' (and not only dots), got {label!r}"
        )
    return label


def check_port(host: str, port: int) -> None:
    """Raises LaunchError when the port cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another VLLM_PORT, or end what uses it "
            "(`bash vllm_server/status.sh` lists our servers)"
        ) from error


def _models(environment: Mapping[str, str]) -> tuple[ServedModel, ...]:
    paths = _listed(environment, "VLLM_MODEL_PATHS")
    if not paths:
        raise LaunchError(
            "VLLM_MODEL_PATHS is empty: say which model to serve, for example "
            "VLLM_MODEL_PATHS=/models/PaCo-Reward-7B VLLM_MODEL_NAMES=PaCo-Reward-7B"
        )
    names = _listed(environment, "VLLM_MODEL_NAMES") or [Path(path).name for path in paths]
    if len(paths) != len(names):
        raise LaunchError(
            f"VLLM_MODEL_PATHS has {len(paths)} entries and VLLM_MODEL_NAMES {len(names)}: give one name a model"
        )
    return tuple(ServedModel(_absolute(path), _name(name)) for path, name in zip(paths, names, strict=True))


def _adapters(environment: Mapping[str, str]) -> tuple[ServedAdapter, ...]:
    """VLLM_LORA: ``name=path`` entries."""
    adapters = []
    for entry in _listed(environment, "VLLM_LORA"):
        name, equals, path = entry.partition("=")
        if not (name.strip() and equals and path.strip()):
            raise LaunchError(f"VLLM_LORA must be name=path (several with commas between), got {entry!r}")
        adapters.append(ServedAdapter(str(Path(path.strip()).expanduser().resolve()), _name(name.strip())))
    return tuple(adapters)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise LaunchError(f"a served name must be 1 to 200 letters, digits or ./:@+_-, got {name!r}")
    return name


def _api_key(environment: Mapping[str, str]) -> str | None:
    key = environment.get("VLLM_API_KEY") or None
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise LaunchError("VLLM_API_KEY must be printable ASCII without spaces, as it travels in a header")
    return key


def _absolute(path: str) -> str:
    """Folders become absolute, since servers do not start where the user stands; hub names stay."""
    folder = Path(path).expanduser()
    return path if HUB_NAME.fullmatch(path) and not folder.exists() else str(folder.resolve())


def _listed(environment: Mapping[str, str], name: str) -> list[str]:
    return [part.strip() for part in environment.get(name, "").split(",") if part.strip()]


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(environment.get(name, "")))
    except ValueError as error:
        raise LaunchError(f"{name} cannot be split into words as a shell would: {error}") from error


def _choice(environment: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """One of ``known``; the first by default."""
    value = environment.get(name) or known[0]
    if value not in known:
        raise LaunchError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def _per_model(environment: Mapping[str, str], name: str, default, count: int, low: float, high: float, whole=False):
    """One number for all models, or one for each."""
    given = _listed(environment, name)
    if not given:
        return (default,) * count
    if len(given) not in (1, count):
        raise LaunchError(f"{name} has {len(given)} entries and there are {count} models: give one, or one a model")
    values = tuple(_parsed(name, text, low, high, whole) for text in given)
    return values * count if len(values) == 1 else values


def _number(environment: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    return _parsed(name, environment.get(name) or str(default), low, high, whole=False)


def _whole(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    return _parsed(name, environment.get(name) or str(default), low, high, whole=True)


def _parsed(name: str, text: str, low: float, high: float, whole: bool):
    try:
        value = int(text) if whole else float(text)
    except ValueError as error:
        raise LaunchError(f"{name} must be a {'whole ' if whole else ''}number, got {text!r}") from error
    if not low <= value <= high:
        raise LaunchError(f"{name} must lie between {low} and {high}, got {text}")
    return value
