"""The models of a launch and their GPUs: what their configurations say, how large they are, and who gets what."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_server.settings import HUB_NAME, LaunchError, LaunchSettings, Weights


@dataclass(frozen=True)
class Model:
    """A model with the adapters that are served on it."""

    path: str
    name: str
    config: dict  # of its language model
    family: str  # model_type of config.json; empty where it is unknown here
    weight_bytes: int | None  # None: unknown here
    adapters: tuple[Weights, ...] = ()
    lora_rank: int = 0  # the largest

    @property
    def names(self) -> tuple[str, ...]:
        """Everything it is served as."""
        return (self.name, *(adapter.name for adapter in self.adapters))


def read_models(settings: LaunchSettings) -> list[Model]:
    """Checks models and adapters. Raises LaunchError."""
    adapters = [(adapter, _adapter_config(adapter)) for adapter in settings.adapters]
    bases = [_base_of(adapter, config, settings.models) for adapter, config in adapters]
    models = []
    for weights in settings.models:
        file = _config_file(weights.path)
        config = _read_json(file) if file else {}
        # The folder of a hub model's config.json in the cache holds its weights, if they were downloaded.
        size = sum(part.stat().st_size for part in file.parent.glob("*.safetensors")) if file else 0
        own = [pair for pair, base in zip(adapters, bases, strict=True) if base == weights]
        rank = max((adapter_config["r"] for _, adapter_config in own), default=0)
        text_config = config.get("text_config") or config
        family = str(config.get("model_type", ""))
        adapted = tuple(adapter for adapter, _ in own)
        models.append(Model(weights.path, weights.name, text_config, family, size or None, adapted, rank))
    return models


def changes_vision(adapter: Weights) -> bool:
    """Whether an adapter changes the vision tower too. Raises LaunchError."""
    path = Path(adapter.path) / "adapter_model.safetensors"
    try:
        with open(path, "rb") as weights:  # the length of a JSON header, the header
            names = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
            return any(".visual." in name for name in names)
    except (ValueError, OverflowError, MemoryError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error


def _config_file(path: str) -> Path | None:
    """config.json in a folder or of the hub; None where only the engine can look it up. Raises LaunchError."""
    folder = Path(path)
    config = folder / "config.json"
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(path):
            raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
        return _from_hub(path)
    if not config.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "it is a LoRA adapter: export merged weights first" if adapter else "is it the right folder?"
        raise LaunchError(f"model folder {folder} has no config.json; {hint}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise LaunchError(f"model folder {folder} has no weights (*.safetensors)")
    return config


def _from_hub(name: str) -> Path | None:
    """config.json of a hub model, from the cache or the hub; None where only the engine can look it up."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"{name!r} is neither a folder in {Path.cwd()} nor a model that the hub or its cache provides: {reason}. "
            "Download it on a machine that reaches the hub, and give its folder in VLLM_MODEL_PATHS"
        ) from error


def _adapter_config(adapter: Weights) -> dict:
    folder = Path(adapter.path)
    path = folder / "adapter_config.json"
    if not path.is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise LaunchError(
            f"VLLM_LORA: {folder} lacks adapter_config.json or adapter_model.safetensors; name a LoRA folder"
        )
    config = _read_json(path)
    if config.get("peft_type", "LORA") != "LORA" or not isinstance(config.get("r"), int):
        raise LaunchError(f"VLLM_LORA: {folder} is not a LoRA adapter (peft_type {config.get('peft_type')!r})")
    return config


def _base_of(adapter: Weights, config: dict, models: tuple[Weights, ...]) -> Weights:
    """The only model, else the one that the adapter's configuration names."""
    if len(models) == 1:
        return models[0]
    base = str(config.get("base_model_name_or_path") or "")
    same_name = [model for model in models if base and Path(model.path).name == Path(base).name]
    exact = [model for model in same_name if model.path in (base, str(Path(base).resolve()))]
    found = exact or same_name
    if len(found) != 1:
        raise LaunchError(
            f"VLLM_LORA: adapter {adapter.name} names {base!r} as its base, which is "
            f"{'more than one' if found else 'none'} of {', '.join(model.path for model in models)}; serve it with its "
            "base alone"
        )
    return found[0]


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise LaunchError(f"{path} is not JSON: {error}") from error


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, none where it is empty; all where it is not set.

    Raises:
        LaunchError: For a GPU that nvidia-smi does not list.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if listed is None else [part.strip() for part in listed.split(",") if part.strip()]
    if wanted == [] or (wanted and wanted[0] == "-1"):
        return ()
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        listing = found.stdout if found.returncode == 0 else ""
    except (FileNotFoundError, subprocess.TimeoutExpired):
        listing = ""
    return choose_gpus(wanted, listing)


def choose_gpus(wanted: Sequence[str] | None, listing: str) -> tuple[str, ...]:
    """Checks ``wanted`` (indices, or prefixes of GPU and MIG UUIDs; None: all) against the output of nvidia-smi -L."""
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    uuids = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listing)
    if wanted is None:
        return tuple(str(index) for index in range(count))
    for gpu in wanted:
        is_uuid = gpu.startswith(("GPU-", "MIG-")) and any(uuid.startswith(gpu) for uuid in uuids)
        if not (is_uuid or (gpu.isdigit() and int(gpu) < count)):
            here = f"GPUs 0 to {count - 1}" if count else "no GPU"
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={','.join(wanted)}: there is no GPU {gpu} here (nvidia-smi lists {here}). "
                "Correct it; empty serves on the CPU"
            )
    if len(set(wanted)) != len(wanted):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES={','.join(wanted)} names a GPU twice")
    return tuple(wanted)


def tensor_parallel_size(gpus: int, config: Mapping) -> int:
    """The largest power of two, at most ``gpus``, that fits the model's heads. Qwen2.5-VL-7B (28 and 4): at most 4.

    1 where ``config`` does not state the heads.
    """
    size = 1
    while 2 * size <= gpus and "num_attention_heads" in config and fits_heads(2 * size, config):
        size *= 2
    return size


def smallest_parallel_size(gpus: int, config: Mapping, weight_bytes: int, memory_bytes: int, utilization: float) -> int:
    """The fewest GPUs that hold a copy and leave two fifths of vLLM's share for keys, values and activations.

    One-token answers to short prompts are faster from many copies than from one that many GPUs share.
    """
    size, largest = 1, tensor_parallel_size(gpus, config)
    while size < largest and weight_bytes / size > 0.6 * utilization * memory_bytes:
        size *= 2
    return size


def smallest_memory(gpus: Sequence[str]) -> int | None:
    """Bytes of the smallest of ``gpus``; None where nvidia-smi does not say (MIG)."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={','.join(gpus)}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in found.splitlines()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def fits_heads(size: int, config: Mapping) -> bool:
    """Whether ``size`` GPUs can share the attention heads evenly, and share or copy the key/value heads evenly.

    True where ``config`` does not state them: vLLM decides.
    """
    heads = int(config.get("num_attention_heads", size))
    key_value_heads = int(config.get("num_key_value_heads", heads))
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def divide_gpus(
    settings: LaunchSettings, models: Sequence[Model], gpus: Sequence[str]
) -> tuple[list[tuple[tuple[str, ...], int]], list[str]]:
    """For each model, its GPUs and the number of its copies on them; and notes on what was chosen and why.

    If the tensor parallelism of every model is given, each gets what it needs. Otherwise all get an equal share. Where
    neither VLLM_TP nor VLLM_REPLICAS is given, copies on as few GPUs as they fit fill the share.

    Raises:
        LaunchError: Naming model and variable.
    """
    if len(gpus) < len(models):
        raise LaunchError(
            f"{len(models)} models and {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: vLLM needs one for each. Name more in "
            "CUDA_VISIBLE_DEVICES, or launch them one after another with a smaller GPU_MEMORY_UTILIZATION each"
        )
    wanted = list(zip(settings.tensor_parallel, settings.replicas, strict=True))
    shares = [len(gpus) // len(models) + (i < len(gpus) % len(models)) for i in range(len(models))]
    if all(size for size, _ in wanted):
        shares = [size * (copies or 1) for size, copies in wanted]
    memory = smallest_memory(gpus) if max(shares) > 1 else None
    places, notes, first = [], [], 0
    for model, (size, copies), share in zip(models, wanted, shares, strict=True):
        if size is None and copies is None and share > 1 and memory and model.weight_bytes:
            utilization = settings.gpu_memory_utilization
            size = smallest_parallel_size(share, model.config, model.weight_bytes, memory, utilization)
            copies = share // size
            notes.append(
                f"{model.name}: VLLM_TP={size}, VLLM_REPLICAS={copies}, because its weights have "
                f"{model.weight_bytes / 2**30:.1f} GiB and a GPU {memory / 2**30:.0f}"
            )
        elif size is None:
            size = tensor_parallel_size(share // (copies or 1), model.config)
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
            raise LaunchError(
                f"{model.name}: its attention heads cannot be divided over VLLM_TP={size} GPUs; leave it unset"
            )
        places.append((tuple(gpus[first : first + size * copies]), copies))
        first += share
    used = {gpu for own, _ in places for gpu in own}
    if unused := [gpu for gpu in gpus if gpu not in used]:
        notes.append(f"GPUs {','.join(unused)} stay unused: VLLM_REPLICAS gives them copies of a model")
    return places, notes
