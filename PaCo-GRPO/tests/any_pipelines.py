"""Tiny random pipelines of every class of any_pipelines.yaml.

``python PaCo-GRPO/tests/any_pipelines.py ChromaPipeline FOLDER`` saves one.
"""

import inspect
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import tiny_pipelines
import torch
import transformers
import yaml
from diffusers import DiffusionPipeline
from tiny_pipelines import (
    KLEIN_CHAT,
    PIXTRAL,
    QWEN3,
    QWEN_21_CHAT,
    SPECIAL,
    VISION_SIZES,
    Z_IMAGE_CHAT,
    build_vae,
    character_tokenizer,
    qwen2_5_vl,
    qwen3_vl_config,
    qwen_tokenizer,
    vision_tokenizer,
)
from tiny_policies import FAMILIES
from torch import nn

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def rows() -> dict[str, dict[str, Any]]:
    """Pipeline class → its components, or why there are none, and what a call needs."""
    return _table()["pipelines"]


def exclusions() -> dict[str, str]:
    """Parts of names of pipelines that are left out, and what those do."""
    return _table()["excluded"]


def flow_matching_pipelines() -> set[str]:
    """The pipelines of the installed diffusers that draw or edit an image by flow matching.

    Those whose scheduler may be a FlowMatchEulerDiscreteScheduler.
    """
    names = set(_table()["also"])
    for name in dir(diffusers):
        is_excluded = any(re.search(part, name) for part in exclusions())
        if is_excluded or not name.endswith("Pipeline"):
            continue
        scheduler = inspect.signature(getattr(diffusers, name)).parameters.get("scheduler")
        if scheduler is not None and "FlowMatchEuler" in str(scheduler.annotation):
            names.add(name)
    return names


def build_any(name: str) -> DiffusionPipeline:
    """The pipeline of class ``name``; every input has an effect on its image."""
    row = rows()[name]
    if "family" in row:
        pipeline = FAMILIES[row["family"]].build()
        for key, component in pipeline.components.items():
            if isinstance(component, nn.Module):
                _enliven(component, row.get("gains", {}).get(key, float(key != "vae")))
        return pipeline
    torch.manual_seed(0)
    components = {}
    for key, description in row["components"].items():
        arguments = dict(description)
        gain = arguments.pop("gain", float(key != "vae"))
        component = _component(arguments)
        if isinstance(component, nn.Module):
            _enliven(component, gain)
        components[key] = component
    return getattr(diffusers, name)(**components)


def _component(arguments: dict[str, Any]) -> object:
    function = arguments.pop("function", None)
    if function is not None:
        build = _FUNCTIONS.get(function) or getattr(tiny_pipelines, function)
        return build(**arguments)
    library, name = arguments.pop("class").split(".")
    kind = getattr(_LIBRARIES[library], name)
    if issubclass(kind, transformers.PreTrainedModel):
        return kind(kind.config_class(**arguments))
    return kind(**arguments)


def _enliven(model: nn.Module, gain: float) -> None:
    """Redraw weights: zeros, and small ones, hide what the inputs do.

    Args:
        gain: Standard deviation of a layer's output at inputs of 1. 0: only weights that are all
            equal are drawn.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2.0)
        for weight in module.parameters(recurse=False):
            is_constant = weight.numel() > 1 and bool(weight.std() == 0)
            with torch.no_grad():
                if isinstance(module, nn.Embedding):
                    weight.normal_()
                elif weight.ndim > 1 and weight.numel() and (gain or is_constant):
                    inputs = weight.numel() / weight.shape[0]
                    weight.normal_(std=(gain or 1.0) / inputs**0.5)
                elif is_constant:
                    weight.add_(0.2 * torch.randn_like(weight))


def _qwen3_vl(layers: int = 4, *, head: bool = True) -> nn.Module:
    config = qwen3_vl_config(vision_tokenizer())
    config.text_config.num_hidden_layers = layers
    kind = transformers.Qwen3VLForConditionalGeneration if head else transformers.Qwen3VLModel
    return kind(config)


def _qwen3_vl_processor() -> transformers.Qwen3VLProcessor:
    sizes = VISION_SIZES | {
        "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
        "min_pixels": 32 * 32,
        "patch_size": 16,
    }
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes),
        vision_tokenizer(),
        transformers.Qwen3VLVideoProcessor(patch_size=16),
        chat_template=QWEN_21_CHAT,
    )


def _chat_tokenizer(chat: str = Z_IMAGE_CHAT) -> transformers.Qwen2Tokenizer:
    tokenizer = qwen_tokenizer("<think>", "</think>")
    tokenizer.chat_template = chat
    return tokenizer


def _mistral3() -> nn.Module:
    text = QWEN3 | {"model_type": "mistral", "vocab_size": 99, "num_hidden_layers": 2}
    config = transformers.Mistral3Config(text_config=text, vision_config=dict(PIXTRAL))
    return transformers.Mistral3Model(config)


_FUNCTIONS = {
    "bos_tokenizer": partial(character_tokenizer, SPECIAL, template="<s> $A"),
    "chat_tokenizer": _chat_tokenizer,
    "flux2_vae": partial(build_vae, diffusers.AutoencoderKLFlux2),
    "klein_tokenizer": partial(_chat_tokenizer, KLEIN_CHAT),
    "mistral3": _mistral3,
    "qwen2_5_vl": lambda layers=1: qwen2_5_vl(layers)[1],
    "qwen2_vl_processor": lambda: qwen2_5_vl()[0],
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_processor": _qwen3_vl_processor,
}

if __name__ == "__main__":
    build_any(sys.argv[1]).save_pretrained(sys.argv[2])
