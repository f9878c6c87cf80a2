"""What to serve: the environment variables of a launch and the models they name.

Nothing is started here.
"""

import ipaddress
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TRAINED_MAX_PIXELS = 2_097_152  # image_max_pixels of the judge's training configurations


class LaunchError(Exception):
    """A launch, stop or status that is not possible."""


def split_list(value: str) -> list[str]:
    """The entries of a list separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())  # servers run in another working folder


_List = Annotated[tuple[str, ...], BeforeValidator(split_list)]
_Words = Annotated[tuple[str, ...], BeforeValidator(shlex.split)]


class LaunchSettings(BaseModel):
    """The environment variables of a launch; not yet compared with the machine."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    paths: _List = Field(alias="VLLM_MODEL_PATHS", min_length=1)
    names: _List = Field((), alias="VLLM_MODEL_NAMES")
    lora: str | None = Field(None, alias="VLLM_LORA")  # no longer served
    host: str = Field("127.0.0.1", alias="VLLM_HOST")
    port: int = Field(8000, alias="VLLM_PORT", ge=1, le=65535)
    # It is sent in a header.
    api_key: str | None = Field(None, alias="VLLM_API_KEY", pattern=r"^[!-~]+$")
    engine: Literal["auto", "vllm", "transformers"] = Field("auto", alias="VLLM_ENGINE")
    # Of each model; None: chosen by size, memory and number of heads.
    tensor_parallel: int | None = Field(None, alias="VLLM_TP", ge=1)
    replicas: int | None = Field(None, alias="VLLM_REPLICAS", ge=1)
    # Of each model; None: chosen by cores and copies.
    api_servers: int | None = Field(None, alias="VLLM_API_SERVERS", ge=1, le=64)
    start_timeout_s: float = Field(1800.0, alias="VLLM_START_TIMEOUT", ge=1, le=86400)
    gpu_memory_utilization: float = Field(0.85, alias="GPU_MEMORY_UTILIZATION", ge=0.01, le=1)
    max_model_len: int = Field(8192, alias="MAX_MODEL_LEN", ge=16, le=1 << 24)
    max_images: int = Field(16, alias="VLLM_MAX_IMAGES", ge=1, le=1024)
    max_pixels: int = Field(TRAINED_MAX_PIXELS, alias="VLLM_MAX_PIXELS", ge=0)  # 0: the model's own
    extra_args: _Words = Field((), alias="VLLM_EXTRA_ARGS")
    max_body_mb: float = Field(32.0, alias="VLLM_MAX_BODY_MB", ge=0.001, le=4096)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
        variables = {name: value for name, value in environment.items() if value}
        try:
            return cls.model_validate(variables)
        except ValidationError as error:
            problems = []
            for detail in error.errors():
                variable = "".join(map(str, detail["loc"][:1]))
                message = detail["msg"].removeprefix("Value error, ")
                problems.append(f"{variable}: {message}" if variable else message)
            raise LaunchError("; ".join(problems)) from error

    @model_validator(mode="after")
    def _check(self) -> "LaunchSettings":
        if self.lora:
            raise ValueError(
                "VLLM_LORA is no longer served: merge the adapter with `paco-reward export --base "
                "MODEL --adapter FOLDER --output MERGED`, and serve MERGED in VLLM_MODEL_PATHS"
            )
        if self.names and len(self.names) != len(self.paths):
            raise ValueError(
                f"VLLM_MODEL_PATHS has {len(self.paths)} entries and VLLM_MODEL_NAMES "
                f"{len(self.names)}"
            )
        served = [name for name, _ in self.models]
        for name in served:
            # Names are words on command lines, rows of tables and file names of logs.
            if not name or name.startswith("-") or not name.isprintable():
                raise ValueError(
                    f"VLLM_MODEL_NAMES: {name!r} cannot be a served name: it must not be empty, "
                    "begin with '-' or hold line breaks or control characters"
                )
        if len(set(served)) != len(served):
            raise ValueError(f"VLLM_MODEL_NAMES contains a name twice: {', '.join(served)}")
        if not is_loopback(self.host) and self.api_key is None:
            raise ValueError(
                f"VLLM_HOST={self.host} opens the judge to other machines: set VLLM_API_KEY, or "
                "use 127.0.0.1"
            )
        return self

    @property
    def models(self) -> list[tuple[str, str]]:
        """Served name (by default the folder's) and folder or hub name of each model."""
        paths = []
        for path in self.paths:
            is_hub_name = _HUB_NAME.fullmatch(path) and not Path(path).exists()
            paths.append(path if is_hub_name else _absolute(path))
        names = self.names or [Path(path).name for path in paths]
        return list(zip(names, paths, strict=True))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches servers on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass
class Model:
    """A model to serve, and what its files say about it."""

    name: str
    path: str  # a local folder, absolute, or a hub name
    config: dict  # of its language model
    family: str  # model_type of config.json
    weight_bytes: int  # 0: unknown here
    max_pixels: int | None = None  # to which its processor shrinks an image; None: it does not say


def read_models(settings: LaunchSettings) -> list[Model]:
    """Read the configurations of the models. Raises LaunchError."""
    return [_read_model(name, path) for name, path in settings.models]


def _read_model(name: str, path: str) -> Model:
    folder = Path(path)
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(path):
            raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
        folder = _hub_folder(path)
    config = _read_json(folder / "config.json")
    return Model(
        name,
        path,
        config=config.get("text_config") or config,
        family=str(config.get("model_type", "")),
        weight_bytes=sum(part.stat().st_size for part in folder.glob("*.safetensors")),
        max_pixels=_processor_max_pixels(folder),
    )


def _hub_folder(name: str) -> Path:
    """The folder in the hub's cache with a model's settings.

    It also has the model's weights if they were downloaded.
    """
    # Not needed for folders, which is all that an environment with nothing but vLLM may serve.
    from huggingface_hub import snapshot_download

    from paco_judge.errors import UserError
    from paco_judge.weights import explain_missing

    patterns = ["config.json", *PROCESSOR_FILES]
    try:
        with explain_missing(name):
            return Path(snapshot_download(name, allow_patterns=patterns))
    except UserError as error:
        raise LaunchError(f"VLLM_MODEL_PATHS: {error}") from error


def _processor_max_pixels(folder: Path) -> int | None:
    for name in PROCESSOR_FILES:
        if not (folder / name).is_file():
            continue
        settings = _read_json(folder / name)
        settings = settings.get("image_processor") or settings
        size = settings.get("size") or {}
        # The name before transformers 5 wins, as in transformers.
        limit = settings.get("max_pixels") or size.get("longest_edge")
        if isinstance(limit, int) and ("shortest_edge" in size or "min_pixels" in settings):
            return limit
    return None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"VLLM_MODEL_PATHS: cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise LaunchError(f"VLLM_MODEL_PATHS: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LaunchError(f"VLLM_MODEL_PATHS: {path} is no JSON object")
    return content
