"""What to launch: the environment variables, the models, and who gets which GPUs. Nothing is started here."""

import json
import math
import re
import reprlib
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SERVED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9./:@+_-]{0,199}")


class LaunchError(Exception):
    """A launch, stop or status that is not possible; the message names the cause and what to do."""


@dataclass(frozen=True)
class Weights:
    """A model (a local folder, absolute, or a hub name) or a LoRA adapter (a local folder), and its served name."""

    path: str
    name: str


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())  # servers run in another working folder


_List = Annotated[tuple[str, ...], BeforeValidator(_split)]
_Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], BeforeValidator(_split)]
_Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]


class LaunchSettings(BaseModel):
    """The environment variables of a launch; not yet compared with the machine."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    paths: _List = Field(alias="VLLM_MODEL_PATHS")
    names: _List = Field((), alias="VLLM_MODEL_NAMES")
    lora: _List = Field((), alias="VLLM_LORA")
    host: str = Field("127.0.0.1", alias="VLLM_HOST")
    port: int = Field(8000, alias="VLLM_PORT", ge=1, le=65535)
    api_key: str | None = Field(None, alias="VLLM_API_KEY", pattern=r"^[!-~]+$")  # it is sent in a header
    engine: Literal["auto", "vllm", "transformers"] = Field("auto", alias="VLLM_ENGINE")
    # One for all models, or one per model; none: chosen by size, memory and number of heads.
    tensor_parallel: _Counts = Field((), alias="VLLM_TP")
    replicas: _Counts = Field((), alias="VLLM_REPLICAS")
    start_timeout_s: float = Field(1800.0, alias="VLLM_START_TIMEOUT", ge=1, le=86400)
    gpu_memory_utilization: float = Field(0.85, alias="GPU_MEMORY_UTILIZATION", ge=0.01, le=1)
    max_model_len: int = Field(8192, alias="MAX_MODEL_LEN", ge=16, le=1 << 24)
    max_images: int = Field(16, alias="VLLM_MAX_IMAGES", ge=1, le=1024)
    media_hosts: Annotated[tuple[_Host, ...], BeforeValidator(_split)] = Field((), alias="VLLM_MEDIA_HOSTS")
    extra_args: Annotated[tuple[str, ...], BeforeValidator(shlex.split)] = Field((), alias="VLLM_EXTRA_ARGS")
    max_body_mb: float = Field(32.0, alias="VLLM_MAX_BODY_MB", ge=0.001, le=4096)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises LaunchError naming the variable."""
        try:
            return cls.model_validate({name: value for name, value in environment.items() if value})
        except ValidationError as error:
            first = error.errors()[0]
            variable = first["loc"][0] if first["loc"] else ""
            if first["type"] == "missing":
                example = "VLLM_MODEL_PATHS=/models/PaCo-Reward-7B VLLM_MODEL_NAMES=PaCo-Reward-7B"
                raise LaunchError(f"{variable} is empty: name the model to serve, for example {example}") from error
            got = f", got {reprlib.repr(first['input'])}" if variable not in ("", "VLLM_API_KEY") else ""
            text = first["msg"].removeprefix("Value error, ")
            raise LaunchError(f"{variable}: {text}{got}" if variable else text) from error

    @model_validator(mode="after")
    def _check(self) -> "LaunchSettings":
        if self.names and len(self.names) != len(self.paths):
            raise ValueError(f"VLLM_MODEL_PATHS has {len(self.paths)} entries and VLLM_MODEL_NAMES {len(self.names)}")
        for variable, values in (("VLLM_TP", self.tensor_parallel), ("VLLM_REPLICAS", self.replicas)):
            if len(values) not in (0, 1, len(self.paths)):
                raise ValueError(f"{variable} has {len(values)} entries for {len(self.paths)} models")
        if wrong := [entry for entry in self.lora if not all(entry.partition("="))]:
            raise ValueError(f"VLLM_LORA must be name=path (several separated by commas), got {wrong[0]!r}")
        served = [weights.name for weights in (*self.models, *self.adapters)]
        if wrong := [name for name in served if not _SERVED_NAME.fullmatch(name)]:
            raise ValueError(f"a served name must be 1 to 200 letters, digits or ./:@+_-, got {wrong[0]!r}")
        if len(set(served)) != len(served):
            raise ValueError(f"VLLM_MODEL_NAMES and VLLM_LORA contain a name twice: {', '.join(served)}")
        return self

    @property
    def models(self) -> tuple[Weights, ...]:
        """The models; without VLLM_MODEL_NAMES, they are called as their folders."""
        paths = [p if _HUB_NAME.fullmatch(p) and not Path(p).exists() else _absolute(p) for p in self.paths]
        return tuple(map(Weights, paths, self.names or [Path(path).name for path in self.paths]))

    @property
    def adapters(self) -> tuple[Weights, ...]:
        """The adapters of VLLM_LORA."""
        entries = [entry.partition("=") for entry in self.lora]
        return tuple(Weights(_absolute(path.strip()), name.strip()) for name, _, path in entries)

    @property
    def places(self) -> list[tuple[int | None, int | None]]:
        """VLLM_TP and VLLM_REPLICAS of each model; None = not given."""
        given = [values or (None,) for values in (self.tensor_parallel, self.replicas)]
        return list(zip(*(v * len(self.paths) if len(v) == 1 else v for v in given), strict=True))


@dataclass
class Model:
    """A model with the adapters that are served on it."""

    path: str
    name: str
    config: dict  # of its language model
    family: str  # model_type of config.json; empty where it is unknown here
    weight_bytes: int | None  # None: unknown here
    adapters: list[Weights] = field(default_factory=list)
    lora_rank: int = 0  # the largest

    @property
    def names(self) -> tuple[str, ...]:
        """Everything it is served as."""
        return (self.name, *(adapter.name for adapter in self.adapters))


def read_models(settings: LaunchSettings) -> list[Model]:
    """Reads the configurations of models and adapters. Raises LaunchError."""
    models = [_read_model(weights) for weights in settings.models]
    for adapter in settings.adapters:
        config, base = _read_adapter(adapter), models[0]
        if len(models) > 1:
            wanted = str(config.get("base_model_name_or_path", "")).rstrip("/")
            exact = [model for model in models if model.path == wanted]
            alike = exact or [model for model in models if Path(model.path).name == Path(wanted).name]
            if len(alike) != 1:
                paths = ", ".join(model.path for model in models)
                raise LaunchError(f"VLLM_LORA: {adapter.name} was trained on {wanted!r}, which is not one of {paths}")
            (base,) = alike
        base.adapters.append(adapter)
        base.lora_rank = max(base.lora_rank, config.get("r", 0))
    return models


def _read_model(weights: Weights) -> Model:
    folder = Path(weights.path)
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(weights.path):
            raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
        folder = _hub_folder(weights.path)
    elif not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "it is a LoRA adapter: export merged weights first" if adapter else "is it the right folder?"
        raise LaunchError(f"model folder {folder} has no config.json; {hint}")
    config = _read_json(folder / "config.json")
    # The folder of a hub model's config.json in the cache holds its weights, if they were downloaded.
    size = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    family = str(config.get("model_type", ""))
    return Model(weights.path, weights.name, config.get("text_config") or config, family, size or None)


def _hub_folder(name: str) -> Path:
    """The folder of a hub model's config.json in the cache."""
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json", etag_timeout=10)).parent
    except Exception as error:  # hub and network errors share no class
        raise LaunchError(
            f"{name!r} is neither a folder in {Path.cwd()} nor a model of the hub or its cache: {error}"
        ) from error


def _read_adapter(adapter: Weights) -> dict:
    """Its configuration."""
    folder = Path(adapter.path)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config.is_file() or not weights.is_file():
        raise LaunchError(f"VLLM_LORA: {folder} is no LoRA folder: it lacks {config.name} or {weights.name}")
    with open(weights, "rb") as file:  # the length of a JSON header, the header
        if b".visual." in file.read(int.from_bytes(file.read(8), "little")):
            raise LaunchError(
                f"VLLM_LORA: {adapter.name} changes the vision tower, which vLLM ignores; merge it (paco-reward export)"
            )
    return _read_json(config)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise LaunchError(f"{path} is not JSON: {error}") from error


def _nvidia_smi(*arguments: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, none where it is empty; all where it is not set. Raises LaunchError."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if listed is None else _split(listed)
    return () if wanted == [] or wanted and wanted[0] == "-1" else choose_gpus(wanted, _nvidia_smi("-L"))


def choose_gpus(wanted: Sequence[str] | None, listing: str) -> tuple[str, ...]:
    """Checks ``wanted`` (indices, or prefixes of GPU and MIG UUIDs; None: all) against the output of nvidia-smi -L."""
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    if wanted is None:
        return tuple(map(str, range(count)))
    for gpu in wanted:
        if not (gpu.startswith(("GPU-", "MIG-")) and gpu in listing or gpu.isdigit() and int(gpu) < count):
            raise LaunchError(f"CUDA_VISIBLE_DEVICES: there is no GPU {gpu} here (nvidia-smi lists {count})")
    return tuple(wanted)


def smallest_memory(gpus: Sequence[str]) -> int | None:
    """Bytes of the smallest of ``gpus``; None where nvidia-smi does not say (MIG)."""
    text = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={','.join(gpus)}")
    sizes = text.split()
    return min(map(int, sizes)) * 2**20 if sizes and all(map(str.isdigit, sizes)) else None


def fits_heads(size: int, config: Mapping) -> bool:
    """Whether ``size`` GPUs can share attention heads, and share or copy key/value heads, evenly; True if unknown."""
    heads = int(config.get("num_attention_heads", size))
    key_value_heads = int(config.get("num_key_value_heads", heads))
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def parallel_size(gpus: int, config: Mapping, enough: float = math.inf) -> int:
    """The first power of two that is ``enough``, else the largest that ``gpus`` and the heads allow; 1 if unknown."""
    size = 1
    while size < enough and 2 * size <= gpus and "num_attention_heads" in config and fits_heads(2 * size, config):
        size *= 2
    return size


def divide_gpus(
    settings: LaunchSettings, models: Sequence[Model], gpus: Sequence[str]
) -> tuple[list[tuple[tuple[str, ...], int]], list[str]]:
    """For each model, its GPUs and the number of its copies on them; and notes on what was chosen. Raises LaunchError.

    If the tensor parallelism of every model is given, each gets what it needs. Otherwise all get an equal share. Where
    neither VLLM_TP nor VLLM_REPLICAS is given, copies on as few GPUs as they fit fill the share: many copies answer
    one-token questions faster than one copy on many GPUs.
    """
    if len(gpus) < len(models):
        raise LaunchError(
            f"{len(models)} models on {len(gpus)} GPU: vLLM needs one for each; or launch them one after another with a "
            "smaller GPU_MEMORY_UTILIZATION each"
        )
    shares = [len(gpus) // len(models) + (i < len(gpus) % len(models)) for i in range(len(models))]
    if all(size for size, _ in settings.places):
        shares = [size * (copies or 1) for size, copies in settings.places]
    memory = smallest_memory(gpus) if max(shares) > 1 else None
    places, notes, first = [], [], 0
    for model, (size, copies), share in zip(models, settings.places, shares, strict=True):
        if size is None and copies is None and share > 1 and memory and model.weight_bytes:
            # Two fifths of vLLM's share are left for keys, values and activations.
            room = 0.6 * settings.gpu_memory_utilization * memory
            size = parallel_size(share, model.config, enough=model.weight_bytes / room)
            copies = share // size
            notes.append(
                f"{model.name}: VLLM_TP={size}, VLLM_REPLICAS={copies}, because its weights have "
                f"{model.weight_bytes / 2**30:.1f} GiB and a GPU {memory / 2**30:.0f}"
            )
        elif size is None:
            size = parallel_size(share // (copies or 1), model.config)
            if share > 1 and copies is None:
                notes.append(
                    f"{model.name}: one copy; its size or its GPU's is unknown here (set VLLM_TP, VLLM_REPLICAS)"
                )
        copies = copies or 1
        available = min(share, len(gpus) - first)
        if size * copies > available:
            raise LaunchError(
                f"{model.name}: VLLM_TP={size} x VLLM_REPLICAS={copies} needs {size * copies} GPUs, and there are "
                f"{available} for it (of {len(gpus)} for {len(models)} models)"
            )
        if not fits_heads(size, model.config):
            raise LaunchError(f"{model.name}: its attention heads cannot be divided over VLLM_TP={size} GPUs")
        places.append((tuple(gpus[first : first + size * copies]), copies))
        first += share
    used = {gpu for own, _ in places for gpu in own}
    if unused := [gpu for gpu in gpus if gpu not in used]:
        notes.append(f"GPUs {','.join(unused)} stay unused: VLLM_REPLICAS gives them copies of a model")
    return places, notes
