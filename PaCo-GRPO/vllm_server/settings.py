"""What to serve: the environment variables of a launch and the models they name."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from paco_judge.errors import UserError
from paco_judge.weights import local_folder

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")  # only this machine reaches servers there
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TRAINED_MAX_PIXELS = 2_097_152  # image_max_pixels of the judge's training configurations


def split_list(value: str) -> list[str]:
    """The entries of a list separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()]


_List = Annotated[tuple[str, ...], BeforeValidator(split_list)]
_Words = Annotated[tuple[str, ...], BeforeValidator(shlex.split)]


class LaunchSettings(BaseModel):
    """The environment variables of a launch."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    paths: _List = Field(alias="VLLM_MODEL_PATHS", min_length=1)
    names: _List = Field((), alias="VLLM_MODEL_NAMES")
    host: str = Field("127.0.0.1", alias="VLLM_HOST")
    port: int = Field(8000, alias="VLLM_PORT", ge=1, le=65535)
    # It is sent in a header.
    api_key: str | None = Field(None, alias="VLLM_API_KEY", pattern=r"^[!-~]+$")
    engine: Literal["auto", "vllm", "transformers"] = Field("auto", alias="VLLM_ENGINE")
    tensor_parallel: int = Field(1, alias="VLLM_TP", ge=1)
    # Of each model; None: as many as there are GPUs for.
    replicas: int | None = Field(None, alias="VLLM_REPLICAS", ge=1)
    # Of each model; None: chosen by cores and copies.
    api_servers: int | None = Field(None, alias="VLLM_API_SERVERS", ge=1, le=64)
    start_timeout_s: float = Field(1800.0, alias="VLLM_START_TIMEOUT", ge=1)
    gpu_memory_utilization: float = Field(0.85, alias="GPU_MEMORY_UTILIZATION", gt=0, le=1)
    max_model_len: int = Field(8192, alias="MAX_MODEL_LEN", ge=16)
    max_images: int = Field(16, alias="VLLM_MAX_IMAGES", ge=1)
    max_pixels: int = Field(TRAINED_MAX_PIXELS, alias="VLLM_MAX_PIXELS", ge=0)  # 0: the model's own
    extra_args: _Words = Field((), alias="VLLM_EXTRA_ARGS")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises UserError naming the variables."""
        variables = {name: value for name, value in environment.items() if value}
        try:
            return cls.model_validate(variables)
        except ValidationError as error:
            problems = []
            for detail in error.errors():
                message = detail["msg"].removeprefix("Value error, ")
                variable = "".join(map(str, detail["loc"][:1]))
                problems.append(f"{variable}: {message}" if variable else message)
            raise UserError("; ".join(problems)) from error

    @model_validator(mode="after")
    def _check(self) -> "LaunchSettings":
        if self.names and len(self.names) != len(self.paths):
            raise ValueError(
                f"VLLM_MODEL_PATHS has {len(self.paths)} entries and VLLM_MODEL_NAMES "
                f"{len(self.names)}"
            )
        served = [name for name, _ in self.models]
        if len(set(served)) != len(served):
            raise ValueError(f"VLLM_MODEL_NAMES contains a name twice: {', '.join(served)}")
        if self.host not in _LOOPBACK and self.api_key is None:
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
            # Servers run in another working folder.
            paths.append(path if is_hub_name else str(Path(path).expanduser().resolve()))
        names = self.names or [Path(path).name for path in paths]
        return list(zip(names, paths, strict=True))


@dataclass
class Model:
    """A model to serve, and what its files say about it."""

    name: str
    path: str  # a local folder, absolute, or a hub name
    family: str  # model_type of config.json
    longest: int | None = None  # tokens; None: it does not say
    max_pixels: int | None = None  # to which its processor shrinks an image; None: it does not say


def read_model(name: str, path: str) -> Model:
    """Read a model's configuration. Raises UserError."""
    folder = local_folder(path, ["config.json", *_PROCESSOR_FILES])
    if not (folder / "config.json").is_file():
        raise UserError(
            f"VLLM_MODEL_PATHS: there is no model in {folder}, which has no config.json"
        )
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    longest = text.get("max_position_embeddings")
    return Model(name, path, config["model_type"], longest, _processor_max_pixels(folder))


def _processor_max_pixels(folder: Path) -> int | None:
    for file in filter(Path.is_file, (folder / name for name in _PROCESSOR_FILES)):
        settings = json.loads(file.read_text())
        settings = settings.get("image_processor") or settings
        size = settings.get("size") or {}
        # The name before transformers 5 wins, as in transformers.
        limit = settings.get("max_pixels") or size.get("longest_edge")
        if isinstance(limit, int) and ("shortest_edge" in size or "min_pixels" in settings):
            return limit
    return None
