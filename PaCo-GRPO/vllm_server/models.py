"""The models and adapters of a launch: whether they exist, and what their configurations say."""

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_server.settings import HUB_NAME, LaunchError, LaunchSettings, Weights


@dataclass(frozen=True)
class Model:
    """A model with the adapters that are served on it."""

    path: str
    name: str
    config: dict  # of its language model
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
        config = _model_config(weights.path)
        own = [pair for pair, base in zip(adapters, bases, strict=True) if base == weights]
        rank = max((adapter_config["r"] for _, adapter_config in own), default=0)
        text_config = config.get("text_config") or config
        models.append(Model(weights.path, weights.name, text_config, tuple(adapter for adapter, _ in own), rank))
    return models


def weight_bytes(path: str) -> int | None:
    """Bytes of a model folder's weights; None for a model that is not a local folder."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) or None


def changes_vision(adapter: Weights) -> bool:
    """Whether an adapter changes the vision tower too. Raises LaunchError."""
    path = Path(adapter.path) / "adapter_model.safetensors"
    try:
        with open(path, "rb") as weights:  # the length of a JSON header, the header
            names = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
            return any(".visual." in name for name in names)
    except (ValueError, OverflowError, MemoryError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error


def _model_config(path: str) -> dict:
    """config.json from a folder or the hub."""
    folder = Path(path)
    config = folder / "config.json"
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(path):
            raise LaunchError(f"model folder {folder} does not exist: correct VLLM_MODEL_PATHS")
        config = _from_hub(path)
        if config is None:
            return {}
    elif not config.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "it is a LoRA adapter: export merged weights first" if adapter else "is it the right folder?"
        raise LaunchError(f"model folder {folder} has no config.json; {hint}")
    elif not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise LaunchError(f"model folder {folder} has no weights (*.safetensors)")
    return _read_json(config)


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
