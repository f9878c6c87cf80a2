"""What to launch: the environment variables, the models, and who gets which GPUs. Nothing is started here."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class LaunchError(Exception):
    """A launch, stop or status that is not possible."""


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())  # servers run in another working folder


_List = Annotated[tuple[str, ...], BeforeValidator(_split)]


class LaunchSettings(BaseModel):
    """The environment variables of a launch; not yet compared with the machine."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    paths: _List = Field(alias="VLLM_MODEL_PATHS", min_length=1)
    names: _List = Field((), alias="VLLM_MODEL_NAMES")
    lora: _List = Field((), alias="VLLM_LORA")
    host: str = Field("127.0.0.1", alias="VLLM_HOST")
    port: int = Field(8000, alias="VLLM_PORT", ge=1, le=65535)
    api_key: str | None = Field(
        None, alias="VLLM_API_KEY", pattern=r"^[!-~]+$"
    )  # it is sent in a header
    engine: Literal["auto", "vllm", "transformers"] = Field("auto", alias="VLLM_ENGINE")
    # Of each model; none: chosen by size, memory and number of heads.
    tensor_parallel: int | None = Field(None, alias="VLLM_TP", ge=1)
    replicas: int | None = Field(None, alias="VLLM_REPLICAS", ge=1)
    start_timeout_s: float = Field(1800.0, alias="VLLM_START_TIMEOUT", ge=1, le=86400)
    gpu_memory_utilization: float = Field(0.85, alias="GPU_MEMORY_UTILIZATION", ge=0.01, le=1)
    max_model_len: int = Field(8192, alias="MAX_MODEL_LEN", ge=16, le=1 << 24)
    max_images: int = Field(16, alias="VLLM_MAX_IMAGES", ge=1, le=1024)
    extra_args: Annotated[tuple[str, ...], BeforeValidator(shlex.split)] = Field(
        (), alias="VLLM_EXTRA_ARGS"
    )
    max_body_mb: float = Field(32.0, alias="VLLM_MAX_BODY_MB", ge=0.001, le=4096)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
        try:
            return cls.model_validate({name: value for name, value in environment.items() if value})
        except ValidationError as error:
            texts = [
                ": ".join([*map(str, each["loc"][:1]), each["msg"]]) for each in error.errors()
            ]
            raise LaunchError("; ".join(texts).replace("Value error, ", "")) from error

    @model_validator(mode="after")
    def _check(self) -> "LaunchSettings":
        if self.names and len(self.names) != len(self.paths):
            raise ValueError(
                f"VLLM_MODEL_PATHS has {len(self.paths)} entries and VLLM_MODEL_NAMES {len(self.names)}"
            )
        if wrong := [entry for entry in self.lora if not all(entry.partition("="))]:
            raise ValueError(
                f"VLLM_LORA must be name=path (several separated by commas), got {wrong[0]!r}"
            )
        served = [name for name, _ in (*self.models, *self.adapters)]
        if len(set(served)) != len(served):
            raise ValueError(
                f"VLLM_MODEL_NAMES and VLLM_LORA contain a name twice: {', '.join(served)}"
            )
        return self

    @property
    def models(self) -> list[tuple[str, str]]:
        """Served name (by default the folder's) and folder or hub name of each model."""
        paths = [
            p if _HUB_NAME.fullmatch(p) and not Path(p).exists() else _absolute(p)
            for p in self.paths
        ]
        return list(zip(self.names or [Path(path).name for path in paths], paths, strict=True))

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Served name and folder of each LoRA adapter."""
        entries = [entry.partition("=") for entry in self.lora]
        return [(name.strip(), _absolute(path.strip())) for name, _, path in entries]


@dataclass
class Model:
    name: str
    path: str  # a local folder, absolute, or a hub name
    config: dict  # of its language model
    family: str  # model_type of config.json
    weight_bytes: int  # 0: unknown here
    adapters: dict[str, str] = field(default_factory=dict)  # folder by served name
    lora_rank: int = 0  # the largest

    @property
    def names(self) -> tuple[str, ...]:
        """Everything it is served as."""
        return (self.name, *self.adapters)


def read_models(settings: LaunchSettings) -> list[Model]:
    """Reads the configurations of models and adapters. Raises LaunchError."""
    models = [_read_model(name, path) for name, path in settings.models]
    for name, path in settings.adapters:
        config, alike = _read_adapter(name, Path(path)), models
        if len(models) > 1:
            wanted = str(config.get("base_model_name_or_path", "")).rstrip("/")
            exact = [model for model in models if model.path == wanted]
            alike = exact or [
                model for model in models if Path(model.path).name == Path(wanted).name
            ]
        if len(alike) != 1:
            paths = ", ".join(model.path for model in models)
            raise LaunchError(
                f"VLLM_LORA: {name} was trained on {wanted!r}, which is not one of {paths}"
            )
        alike[0].adapters[name] = path
        alike[0].lora_rank = max(alike[0].lora_rank, config.get("r", 0))
    return models


def _read_model(name: str, path: str) -> Model:
    folder = Path(path)
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(path):
            raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
        try:  # weights that were downloaded are beside config.json in the cache
            from huggingface_hub import hf_hub_download

            folder = Path(hf_hub_download(path, "config.json", etag_timeout=10)).parent
        except Exception as error:  # hub and network errors share no class
            raise LaunchError(
                f"{path!r} is neither a folder in {Path.cwd()} nor a model of the hub or its cache: {error}"
            ) from error
    config = _read_json("VLLM_MODEL_PATHS", folder / "config.json")
    size = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    return Model(
        name, path, config.get("text_config") or config, str(config.get("model_type", "")), size
    )


def _read_adapter(name: str, folder: Path) -> dict:
    config = _read_json("VLLM_LORA", folder / "adapter_config.json")
    try:
        with open(
            folder / "adapter_model.safetensors", "rb"
        ) as file:  # the length of a JSON header, the header
            visual = b".visual." in file.read(int.from_bytes(file.read(8), "little"))
    except OSError as error:
        raise LaunchError(f"VLLM_LORA: {folder} is no LoRA folder: {error}") from error
    if visual:
        raise LaunchError(
            f"VLLM_LORA: {name} changes the vision tower, which vLLM ignores; merge it first"
        )
    return config


def _read_json(option: str, path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"{option}: cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise LaunchError(f"{option}: {path} is not JSON: {error}") from error


def gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine; 0: unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 if line.strip().isdigit() else 0 for line in lines]


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES (indices, or UUIDs of GPUs and MIG instances); all GPUs if it is not set.

    Raises LaunchError: There is no such GPU.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and (not _split(listed) or listed.startswith("-1")):
        return ()
    count = len(gpu_memory())
    if listed is None:
        return tuple(map(str, range(count)))
    for gpu in _split(listed):
        if not (gpu.startswith(("GPU-", "MIG-")) and count or gpu.isdigit() and int(gpu) < count):
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES: there is no GPU {gpu} here (nvidia-smi lists {count})"
            )
    return tuple(_split(listed))


def fits_heads(size: int, config: Mapping) -> bool:
    """Whether ``size`` GPUs can share attention heads, and share or copy key/value heads, evenly; true if unknown."""
    heads = int(config.get("num_attention_heads", size))
    key_value_heads = int(config.get("num_key_value_heads", heads))
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def parallel_size(gpus: int, config: Mapping, enough: float = float("inf")) -> int:
    """The first power of two that is ``enough``, else the largest that ``gpus`` and the heads allow; 1 if unknown."""
    size = 1
    while (
        size < enough
        and 2 * size <= gpus
        and "num_attention_heads" in config
        and fits_heads(2 * size, config)
    ):
        size *= 2
    return size


def divide_gpus(
    settings: LaunchSettings, models: Sequence[Model], gpus: Sequence[str]
) -> list[tuple[tuple[str, ...], int]]:
    """For each model, its GPUs and the number of its copies on them. Raises LaunchError.

    If VLLM_TP is given, each model gets what it needs. Otherwise all get an equal share. Where neither VLLM_TP nor
    VLLM_REPLICAS is given, copies on as few GPUs as they fit fill the share: many copies answer one-token questions
    faster than one copy on many GPUs.
    """
    if len(gpus) < len(models):
        raise LaunchError(
            f"{len(models)} models on {len(gpus)} GPU: vLLM needs one for each; or launch them one after another with a "
            "smaller GPU_MEMORY_UTILIZATION each"
        )
    every = gpu_memory()
    memory = min([every[int(gpu)] for gpu in gpus if gpu.isdigit()] or every, default=0)
    if any(gpu.startswith("MIG-") for gpu in gpus):
        memory = 0  # unknown: an instance has a part of its GPU's
    places, rest = [], list(gpus)
    for index, model in enumerate(models):
        size, copies = settings.tensor_parallel, settings.replicas
        share = (
            size * (copies or 1)
            if size
            else len(gpus) // len(models) + (index < len(gpus) % len(models))
        )
        if size is None and copies is None and memory and model.weight_bytes:
            # Two fifths of vLLM's share are left for keys, values and activations.
            room = 0.6 * settings.gpu_memory_utilization * memory
            size = parallel_size(share, model.config, enough=model.weight_bytes / room)
            copies = share // size
        copies = copies or 1
        size = size or parallel_size(share // copies, model.config)
        own = tuple(rest[:share][: size * copies])
        if len(own) < size * copies:
            raise LaunchError(
                f"{model.name}: VLLM_TP={size} x VLLM_REPLICAS={copies} needs {size * copies} GPUs, and there are "
                f"{len(own)} for it (of {len(gpus)} for {len(models)} models)"
            )
        if not fits_heads(size, model.config):
            raise LaunchError(
                f"{model.name}: its attention heads cannot be divided over VLLM_TP={size} GPUs"
            )
        places.append((own, copies))
        rest = rest[share:]
    return places
