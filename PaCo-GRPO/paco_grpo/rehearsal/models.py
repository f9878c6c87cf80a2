"""Generators built from their shapes alone: without weights (to count), or with random ones (to time).

Nothing is downloaded. The trainer's own policy classes get a diffusers pipeline that is built here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate import PartialState
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    T5Config,
    T5EncoderModel,
)

from paco_grpo.policies import POLICIES, Policy
from paco_grpo.rehearsal.architectures import PRESETS, Architecture

PIPELINES = {
    "flux": FluxPipeline, "flux_kontext": FluxKontextPipeline, "qwen_image_edit": QwenImageEditPipeline,
}  # fmt: skip
# Hub names of the named configurations -> preset.
KNOWN_MODELS = {
    "black-forest-labs/FLUX.1-dev": "flux-dev",
    "black-forest-labs/FLUX.1-Kontext-dev": "kontext-dev",
    "Qwen/Qwen-Image-Edit": "qwen-edit",
}
PROMPTS = Path(__file__).resolve().parents[2] / "dataset" / "T2IS" / "train_metadata.jsonl"
_STD = 0.02  # of every random matrix: activations neither vanish nor overflow in bfloat16
# Of black-forest-labs/FLUX.1-dev and Qwen/Qwen-Image-Edit.
_FLUX_SCHEDULER = {
    "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip
_QWEN_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip
_SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<unk>",
)  # fmt: skip


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
        elif isinstance(part, PreTrainedTokenizerBase):
            part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": type(pipeline).__name__}))
    return folder


@contextmanager
def random_weights(architecture: Architecture) -> Iterator[None]:
    """Inside the block, diffusers builds ``architecture`` with random weights instead of loading a pipeline."""

    def from_pretrained(path: Path, *, dtype: torch.dtype, **_: Any) -> DiffusionPipeline:
        return pipeline_of(architecture, dtype, PartialState().device)

    with mock.patch.object(PIPELINES[architecture.family], "from_pretrained", from_pretrained):
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
        modules = _qwen_modules(architecture, dtype) if architecture.vision else _flux_modules(architecture, dtype)
    generator = None if device.type == "meta" or not random else torch.Generator(device).manual_seed(architecture.seed)
    for module in modules.values():
        module.requires_grad_(False).eval()
        if generator is not None:
            _randomize(module, generator)
    if architecture.vision:
        return _qwen_pipeline(modules)
    clip = architecture.clip
    return PIPELINES[architecture.family](
        scheduler=FlowMatchEulerDiscreteScheduler(**_FLUX_SCHEDULER),
        tokenizer=_tokenizer("<s> $A </s>", clip["max_position_embeddings"], _SPECIAL),
        tokenizer_2=_tokenizer("$A </s>", 512, _SPECIAL),
        **modules,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _flux_modules(architecture: Architecture, dtype: torch.dtype) -> dict[str, nn.Module]:
    with _default_dtype(dtype):
        modules = {
            "transformer": FluxTransformer2DModel(**architecture.transformer),
            "text_encoder": CLIPTextModel(
                CLIPTextConfig(**architecture.clip, pad_token_id=0, eos_token_id=1, bos_token_id=3)
            ),
            "text_encoder_2": T5EncoderModel(
                T5Config(**architecture.text, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
            ),
        }
    return modules | {"vae": AutoencoderKL(**architecture.vae)}


def _qwen_modules(architecture: Architecture, dtype: torch.dtype) -> dict[str, nn.Module]:
    # ids of the special tokens: their places in _QWEN_SPECIAL
    config = Qwen2_5_VLConfig(
        text_config=architecture.text | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        vision_config=architecture.vision,
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=6,
        video_token_id=7,
        tie_word_embeddings=False,
    )
    with _default_dtype(dtype):
        modules = {
            "transformer": QwenImageTransformer2DModel(**architecture.transformer),
            "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        }
    return modules | {"vae": AutoencoderKLQwenImage(**architecture.vae)}


def _qwen_pipeline(modules: dict[str, nn.Module]) -> QwenImageEditPipeline:
    vision = modules["text_encoder"].config.vision_config
    sizes = {
        "patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
    }  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(**_QWEN_SCHEDULER)
    tokenizer = _tokenizer("$A", 131072, _QWEN_SPECIAL)
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes), chat_template=""
    )
    return QwenImageEditPipeline(scheduler=scheduler, tokenizer=tokenizer, processor=processor, **modules)


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


def _tokenizer(template: str, model_max_length: int, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Gives about as many tokens as the real one, which would have to be downloaded; every piece is ``<unk>``.

    Args:
        template: Special tokens around the text ``$A``.
        model_max_length: In tokens.
        special: Tokens with the ids 0, 1, …; the first one pads.
    """
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(special)}, unk_token="<unk>"))
    # about 1.5 pieces per word with punctuation, close to what real tokenizers need for English
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w{1,8}|[^\w\s]"), behavior="removed", invert=True)
    around = [(token, i) for i, token in enumerate(special) if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], unk_token="<unk>", model_max_length=model_max_length,
        additional_special_tokens=list(special),
    )  # fmt: skip
