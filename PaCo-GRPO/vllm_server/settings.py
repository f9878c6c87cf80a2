"""What a launch is asked to do: environment variables of the guide, checked before anything is started."""

import json
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("auto", "vllm", "transformers")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LaunchError(Exception):
    """A launch, stop or status that cannot be done; the message names the thing and the remedy."""


@dataclass(frozen=True)
class ServedModel:
    """One model: a local folder (absolute) or a hub name, and the name it is asked for by."""

    path: str
    name: str


@dataclass(frozen=True)
class LaunchSettings:
    """The environment variables of a launch, checked in form (not yet against the machine)."""

    models: tuple[ServedModel, ...]
    host: str
    port: int
    label: str
    engine: str
    gpu_memory_utilization: float
    max_model_len: int
    start_timeout_s: float
    extra_args: tuple[str, ...]
    api_key: str | None

    @property
    def url(self) -> str:
        """Where this machine reaches the server."""
        return local_url(self.host, self.port)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
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
        if len(set(names)) != len(names):
            raise LaunchError(f"VLLM_MODEL_NAMES has a name twice: {', '.join(names)}")
        if len(paths) > 1:
            raise LaunchError(
                f"{len(paths)} models behind one port are not supported yet: launch each by itself, with its own "
                "VLLM_PORT and VLLM_LABEL"
            )
        label = label_from(environment)
        engine = environment.get("VLLM_ENGINE") or "auto"
        if engine not in ENGINES:
            raise LaunchError(f"VLLM_ENGINE must be one of {', '.join(ENGINES)}, got {engine!r}")
        return cls(
            models=tuple(ServedModel(_absolute(path), name) for path, name in zip(paths, names, strict=True)),
            host=environment.get("VLLM_HOST") or "127.0.0.1",
            port=int(_number(environment, "VLLM_PORT", 8000, 1, 65535, whole=True)),
            label=label,
            engine=engine,
            gpu_memory_utilization=_number(environment, "GPU_MEMORY_UTILIZATION", 0.85, 0.01, 1.0),
            max_model_len=int(_number(environment, "MAX_MODEL_LEN", 8192, 16, 1 << 24, whole=True)),
            start_timeout_s=_number(environment, "VLLM_START_TIMEOUT", 1800, 1, 86400),
            extra_args=tuple(shlex.split(environment.get("VLLM_EXTRA_ARGS", ""))),
            api_key=environment.get("VLLM_API_KEY") or None,
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


def check_model(model: ServedModel) -> dict:
    """The model's config.json, from its folder or the hub. Raises LaunchError when there is no such model."""
    folder = Path(model.path)
    if folder.is_dir():
        config = folder / "config.json"
        if not config.is_file():
            adapter = (folder / "adapter_config.json").is_file()
            hint = "it is a LoRA adapter: export merged weights first" if adapter else "is it the right folder?"
            raise LaunchError(f"model folder {folder} has no config.json; {hint}")
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise LaunchError(f"model folder {folder} has no weights (*.safetensors)")
    elif _HUB_NAME.fullmatch(model.path):
        config = _hub_config(model.path)
    else:
        raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
    try:
        return json.loads(config.read_text())
    except ValueError as error:
        raise LaunchError(f"{config} is not JSON: {error}") from error


def _hub_config(name: str) -> Path:
    """config.json of a hub model, from the cache or the hub. Raises LaunchError."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise LaunchError(f"no folder {name!r} here, and huggingface_hub is not installed to look for it") from error
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"{name!r} is neither a folder here ({Path.cwd()}) nor a model that can be had from the hub or its cache: "
            f"{reason}. Download it on a machine that reaches the hub, and give its folder in VLLM_MODEL_PATHS"
        ) from error


def _absolute(path: str) -> str:
    """Folders become absolute, since servers do not start where the user stands; hub names stay."""
    folder = Path(path).expanduser()
    return path if _HUB_NAME.fullmatch(path) and not folder.exists() else str(folder.resolve())


def _listed(environment: Mapping[str, str], name: str) -> list[str]:
    return [part.strip() for part in environment.get(name, "").split(",") if part.strip()]


def _number(environment: Mapping[str, str], name: str, default: float, low: float, high: float, whole=False) -> float:
    text = environment.get(name) or str(default)
    try:
        value = int(text) if whole else float(text)
    except ValueError as error:
        raise LaunchError(f"{name} must be a {'whole ' if whole else ''}number, got {text!r}") from error
    if not low <= value <= high:
        raise LaunchError(f"{name} must lie between {low} and {high}, got {text}")
    return value
