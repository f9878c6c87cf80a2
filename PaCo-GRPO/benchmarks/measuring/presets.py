"""A configuration's generator by its architecture alone, without its weights: known sizes, or a local folder's.

Counting (on the meta device nothing is allocated) and timing (random weights) both start from here.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from measuring.architectures import PRESETS
from measuring.generators import pipeline_of

# Hub names of the named configurations -> architecture.
KNOWN_MODELS: dict[str, str] = {
    "black-forest-labs/FLUX.1-dev": "flux-dev",
    "black-forest-labs/FLUX.1-Kontext-dev": "kontext-dev",
    "Qwen/Qwen-Image-Edit": "qwen-edit",
}


class PresetError(ValueError):
    """An architecture that is not known; the message lists those that are."""


def build(model: str, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """The pipeline of ``pretrained.model``, its parameters as each class initialises them.

    Args:
        model: A preset of ``measuring.architectures``, a hub name of ours, or a pipeline folder.
        dtype: Of every parameter but the VAE's, which are float32, as the policies want it.
        device: Where the parameters are made.

    Raises:
        PresetError: Neither of these.
    """
    name = KNOWN_MODELS.get(model, model)
    if name in PRESETS:
        return pipeline_of(PRESETS[name], dtype, device)
    folder = Path(model).expanduser()
    if (folder / "model_index.json").is_file():
        return _from_folder(folder, dtype, device)
    raise PresetError(
        f"the architecture of {model!r} is not known here: give a pipeline folder, or one of "
        f"{', '.join([*PRESETS, *KNOWN_MODELS])}"
    )


def _from_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """Every component from its configuration; the weights are not read."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts = {
        part: _component(folder / part, *entry, torch.float32 if part == "vae" else dtype, device)
        for part, entry in index.items()
        if isinstance(entry, list) and entry[0] is not None
    }
    return getattr(diffusers, index["_class_name"])(**parts)


def _component(folder: Path, module: str, class_name: str, dtype: torch.dtype, device: torch.device) -> Any:
    kind = getattr(importlib.import_module(module), class_name)
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(folder)  # scheduler, tokenizer, processor
    diffusers_model = hasattr(kind, "load_config")
    config = kind.load_config(folder) if diffusers_model else kind.config_class.from_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return kind.from_config(config) if diffusers_model else kind(config)
    finally:
        torch.set_default_dtype(before)
