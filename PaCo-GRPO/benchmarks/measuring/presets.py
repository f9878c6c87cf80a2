"""Generators by their architecture alone, without weights: real sizes from published configurations, or a local folder's.

The modules are made inside a context of the caller's, so that the same function serves counting (fake tensors, nothing
is allocated) and timing (random weights on an accelerator):

    pipeline = build("flux-dev", torch.bfloat16, inside=torch.device("cuda"))

Tokenizers and image processors hold no memory worth counting and would have to be downloaded: they are None.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

# Architectures of black-forest-labs/FLUX.1-dev (and -Kontext-dev) and Qwen/Qwen-Image-Edit, from their config.json files.
_FLUX_TRANSFORMER = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_FLUX_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip
_T5_XXL = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "vocab_size": 49408, "max_position_embeddings": 77, "projection_dim": 768,
}  # fmt: skip
_FLUX_SCHEDULER = {
    "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip
_QWEN_TRANSFORMER = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 3584, "guidance_embeds": False, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_QWEN_VL = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip

PRESETS: dict[str, str] = {
    "flux-dev": "FluxPipeline",
    "flux-kontext": "FluxKontextPipeline",
    "qwen-image-edit": "QwenImageEditPipeline",
}
# Hub names of the configurations -> architecture.
KNOWN_MODELS: dict[str, str] = {
    "black-forest-labs/FLUX.1-dev": "flux-dev",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux-kontext",
    "Qwen/Qwen-Image-Edit": "qwen-image-edit",
}


class PresetError(ValueError):
    """An architecture that is not known; the message lists those that are."""


def resolve(model: str) -> str:
    """Name for :func:`build` of a configuration's ``pretrained.model``: a preset, or the folder itself.

    Raises:
        PresetError: Neither a known model nor a folder with a pipeline.
    """
    if model in PRESETS:
        return model
    if model in KNOWN_MODELS:
        return KNOWN_MODELS[model]
    if (Path(model).expanduser() / "model_index.json").is_file():
        return model
    raise PresetError(
        f"the architecture of {model!r} is not known here: give a pipeline folder, or one of "
        f"{', '.join([*PRESETS, *KNOWN_MODELS])}"
    )


def build(
    name: str, dtype: torch.dtype = torch.float32, inside: AbstractContextManager | None = None
) -> DiffusionPipeline:
    """The pipeline called ``name`` (see :func:`resolve`), its parameters as each class initialises them.

    Args:
        name: A preset, a hub name that is known, or a folder.
        dtype: Of every parameter but the VAE's, which are float32, as the policies want it.
        inside: The modules (and nothing else) are made in this context, for example ``torch.device("cuda")``.

    Raises:
        PresetError: Unknown name.
    """
    name = resolve(name)
    if name not in PRESETS:
        class_name, parts = _folder_parts(Path(name).expanduser())
    else:
        class_name, parts = PRESETS[name], _flux_parts() if name.startswith("flux") else _qwen_parts()
    modules = {
        part: _made(make, torch.float32 if part == "vae" else dtype, inside or nullcontext())
        for part, make in parts.items()
        if isinstance(make, FunctionType)
    }
    return getattr(diffusers, class_name)(**(parts | modules))


def _made(make: Callable[[], torch.nn.Module], dtype: torch.dtype, inside: AbstractContextManager) -> torch.nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with inside:
            return make()
    finally:
        torch.set_default_dtype(before)


# Each part is the object itself, or, for what has parameters, a function that makes it.


def _flux_parts() -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(**_FLUX_SCHEDULER),
        "vae": lambda: diffusers.AutoencoderKL(**_FLUX_VAE),
        "text_encoder": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**_CLIP_L)),
        "tokenizer": None,
        "text_encoder_2": lambda: transformers.T5EncoderModel(transformers.T5Config(**_T5_XXL)),
        "tokenizer_2": None,
        "transformer": lambda: diffusers.FluxTransformer2DModel(**_FLUX_TRANSFORMER),
    }


def _qwen_parts() -> dict[str, Any]:
    config = transformers.Qwen2_5_VLConfig(**_QWEN_VL)
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(**_QWEN_SCHEDULER),
        "vae": lambda: diffusers.AutoencoderKLQwenImage(),  # the class's defaults are Qwen-Image's
        "text_encoder": lambda: transformers.Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": None,
        "processor": None,
        "transformer": lambda: diffusers.QwenImageTransformer2DModel(**_QWEN_TRANSFORMER),
    }


def _folder_parts(folder: Path) -> tuple[str, dict[str, Any]]:
    """Pipeline class of a local folder, and its components from their configurations; the weights are not read."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    entries = {part: entry for part, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    return index["_class_name"], {part: _component(folder / part, *entry) for part, entry in entries.items()}


def _component(folder: Path, module: str, class_name: str) -> Any:
    kind = getattr(importlib.import_module(module), class_name)
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(folder)  # scheduler, tokenizer, processor
    if hasattr(kind, "load_config"):  # diffusers
        config = kind.load_config(folder)
        return lambda: kind.from_config(config)
    config = kind.config_class.from_pretrained(folder)  # transformers
    return lambda: kind(config)
