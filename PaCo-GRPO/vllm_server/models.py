"""Whether the models and adapters of a launch are there, and what their configurations say."""

import json
from pathlib import Path

from vllm_server.settings import HUB_NAME, LaunchError, ServedAdapter, ServedModel


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
    elif HUB_NAME.fullmatch(model.path):
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


def text_config(config: dict) -> dict:
    """The language model's part of a configuration."""
    return config.get("text_config") or config


def check_adapter(adapter: ServedAdapter) -> dict:
    """The adapter's adapter_config.json. Raises LaunchError when there is no LoRA adapter of peft's."""
    folder = Path(adapter.path)
    config = folder / "adapter_config.json"
    if not config.is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise LaunchError(
            f"VLLM_LORA: {folder} has no adapter_config.json with adapter_model.safetensors; name the folder of a LoRA"
        )
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise LaunchError(f"{config} is not JSON: {error}") from error
    if content.get("peft_type", "LORA") != "LORA" or not isinstance(content.get("r"), int):
        raise LaunchError(f"VLLM_LORA: {folder} is not a LoRA adapter (peft_type {content.get('peft_type')!r})")
    return content


def touches_vision(adapter: ServedAdapter) -> bool:
    """Whether the adapter changes the vision tower too."""
    from safetensors import SafetensorError, safe_open

    path = Path(adapter.path) / "adapter_model.safetensors"
    try:
        with safe_open(path, framework="numpy") as weights:
            return any(".visual." in name for name in weights.keys())  # noqa: SIM118 (safe_open is no mapping)
    except SafetensorError as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error


def base_of(adapter: ServedAdapter, config: dict, models: tuple[ServedModel, ...]) -> ServedModel:
    """The model that an adapter belongs to: the only one, else the one that its configuration names.

    Raises LaunchError when several are served and it names none of them, or more than one.
    """
    if len(models) == 1:
        return models[0]
    base = str(config.get("base_model_name_or_path") or "")
    same = [model for model in models if base and Path(model.path).name == Path(base).name]
    exact = [model for model in same if model.path in (base, str(Path(base).resolve()))]
    found = exact or same
    if len(found) != 1:
        raise LaunchError(
            f"VLLM_LORA: the adapter {adapter.name} says that its base is {base!r}, which is "
            f"{'more than one' if found else 'none'} of {', '.join(model.path for model in models)}; serve it with its "
            "base alone"
        )
    return found[0]
