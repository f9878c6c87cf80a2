"""Generators built from their shapes alone: without weights (to count), or with random ones (to time).

Nothing is downloaded. The trainer's own policy classes get a diffusers pipeline that is built here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
from accelerate import PartialState
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from paco_grpo.policies import POLICIES, Policy
from paco_grpo.rehearsal.architectures import KNOWN_MODELS, PRESETS, Architecture, Module, Tokens

PROMPTS = Path(__file__).resolve().parents[2] / "dataset" / "T2IS" / "train_metadata.jsonl"
_STD = 0.02  # of every random matrix: activations neither vanish nor overflow in bfloat16


class UnknownModelError(ValueError):
    """The architecture of a model is not known; the message lists those that are."""


def policy_of(pipeline: DiffusionPipeline, **options: Any) -> Policy:
    """The trainer's policy for ``pipeline``."""
    module, name = POLICIES[type(pipeline).__name__].split(":")
    return getattr(importlib.import_module(module), name)(pipeline, **options)


def build(model: str, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """The pipeline of ``pretrained.model`` with the architecture of the real one and without its weights.

    Args:
        model: A preset of ``rehearsal.architectures``, a known hub name, or a local pipeline folder.
        dtype: Data type of all parameters except the VAE's, which are float32.
        device: Where the parameters are created.

    Raises:
        UnknownModelError: None of these.
    """
    if (known := architecture_of(model)) is not None:
        return pipeline_of(known, dtype, device)
    folder = Path(model).expanduser()
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts = {
        part: _component(folder / part, *entry, torch.float32 if part == "vae" else dtype, device)
        for part, entry in index.items()
        if isinstance(entry, list) and entry[0] is not None
    }
    return getattr(diffusers, index["_class_name"])(**parts)


def architecture_of(model: str) -> Architecture | None:
    """The known architecture called ``model`` (a preset or a hub name); None for a folder.

    Raises:
        UnknownModelError: Neither.
    """
    name = KNOWN_MODELS.get(model, model)
    if name not in PRESETS and not (Path(model).expanduser() / "model_index.json").is_file():
        raise UnknownModelError(
            f"the architecture of {model!r} is not known here: give a pipeline folder, or one of "
            f"{', '.join([*PRESETS, *KNOWN_MODELS])}"
        )
    return PRESETS.get(name)


def _component(folder: Path, module: str, class_name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """One part of a pipeline folder from its configuration; weights are not read."""
    kind = getattr(importlib.import_module(module), class_name)
    if not issubclass(kind, nn.Module):
        return kind.from_pretrained(folder)  # scheduler, tokenizer, processor
    from_diffusers = hasattr(kind, "load_config")
    config = kind.load_config(folder) if from_diffusers else kind.config_class.from_pretrained(folder)
    with _default_dtype(dtype), device:
        return kind.from_config(config) if from_diffusers else kind(config)


def write(architecture: Architecture, folder: Path) -> Path:
    """Write a model folder with everything but weights; ``random_weights`` makes them when it is loaded."""
    folder.mkdir(parents=True)
    pipeline = pipeline_of(architecture, torch.float32, "meta")
    for name, part in pipeline.components.items():
        if hasattr(part, "save_config"):  # diffusers' modules and schedulers
            part.save_config(folder / name)
        elif isinstance(part, PreTrainedModel):
            part.config.save_pretrained(folder / name)
        elif isinstance(part, PreTrainedTokenizerBase | PixtralProcessor):  # FLUX.2-dev's tokenizer is a processor
            part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": type(pipeline).__name__}))
    return folder


@contextmanager
def random_weights(architecture: Architecture) -> Iterator[None]:
    """Inside the block, diffusers builds ``architecture`` with random weights instead of loading a pipeline."""

    def from_pretrained(path: Path, *, dtype: torch.dtype, **_: Any) -> DiffusionPipeline:
        return pipeline_of(architecture, dtype, PartialState().device)

    with mock.patch.object(getattr(diffusers, architecture.pipeline), "from_pretrained", from_pretrained):
        yield


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline_of(
    architecture: Architecture, dtype: torch.dtype, device: torch.device | str, random: bool = True
) -> DiffusionPipeline:
    """The whole pipeline of ``architecture`` with random weights.

    Args:
        architecture: What to build.
        dtype: Data type of transformer and text encoders; the VAE is float32, as policies expect it.
        device: Where; ``meta`` for shapes alone.
        random: Make random weights, which takes time; otherwise they are as each class initializes them.
    """
    device = torch.device(device)
    with device:
        modules = {name: _built(module, dtype) for name, module in architecture.modules.items()}
    generator = None if device.type == "meta" or not random else torch.Generator(device).manual_seed(architecture.seed)
    for module in modules.values():
        module.requires_grad_(False).eval()
        if generator is not None:
            _randomize(module, generator)
    tokenizers = {name: _tokenizer(tokens) for name, tokens in architecture.tokenizers.items()}
    for name, tokens in architecture.tokenizers.items():
        if tokens.processor:
            tokenizers[name] = PROCESSORS[tokens.processor](tokenizers[name], modules)
    scheduler = FlowMatchEulerDiscreteScheduler(**architecture.scheduler)
    kind = getattr(diffusers, architecture.pipeline)
    return kind(scheduler=scheduler, **modules, **tokenizers, **architecture.others)


def _built(module: Module, dtype: torch.dtype) -> nn.Module:
    """One network; the autoencoder is float32."""
    kind = getattr(diffusers, module.kind, None)
    if kind is None:
        kind = getattr(transformers, module.kind)
        with _default_dtype(dtype):
            return kind(kind.config_class(**module.config))
    with _default_dtype(torch.float32 if module.kind.startswith("Autoencoder") else dtype):
        return kind(**module.config)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _randomize(module: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, _STD, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)  # scales of norms


# --- tokenizers -------------------------------------------------------------------------------------------------------


@cache
def t2is_prompts() -> tuple[str, ...]:
    """The repository's own training prompts."""
    return tuple(json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines())


def _tokenizer(tokens: Tokens) -> PreTrainedTokenizerFast:
    """Gives about as many tokens as the real one; every piece of text is ``<unk>``."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens.special)}, unk_token="<unk>"))
    # about 1.5 pieces per word with punctuation, close to what real tokenizers need for English
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w{1,8}|[^\w\s]"), behavior="removed", invert=True)
    around = [(token, i) for i, token in enumerate(tokens.special) if token in tokens.template]
    tokenizer.post_processor = processors.TemplateProcessing(single=tokens.template, special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=tokens.special[0], unk_token="<unk>", model_max_length=tokens.length,
        additional_special_tokens=list(tokens.special), chat_template=tokens.chat_template or None,
    )  # fmt: skip


def _qwen2_vl(tokenizer: PreTrainedTokenizerFast, modules: dict[str, nn.Module]) -> Qwen2VLProcessor:
    vision = modules["text_encoder"].config.vision_config
    sizes = {
        "patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
    }  # fmt: skip
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes), chat_template=""
    )


def _pixtral(tokenizer: PreTrainedTokenizerFast, modules: dict[str, nn.Module]) -> PixtralProcessor:
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=tokenizer.chat_template)


# ``Tokens.processor`` -> made from its tokenizer and the modules of the pipeline.
PROCESSORS: dict[str, Callable[[PreTrainedTokenizerFast, dict[str, nn.Module]], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "pixtral": _pixtral,
}
