"""Generators with random weights, made on the device in the wanted precision: no files, no downloads.

``register()`` makes ``load_policy`` know folders that ``write`` wrote; the policy classes are the trainer's
own, given a pipeline whose ``from_pretrained`` makes weights instead of reading them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    T5Config,
    T5EncoderModel,
)

from measuring.architectures import FILE, Architecture
from measuring.words import piece_tokenizer, qwen_tokenizer
from paco_grpo.policies import loading
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.policies.flux_kontext import FluxKontextPolicy
from paco_grpo.policies.qwen_image_edit import QwenImageEditPolicy

_STD = 0.02  # of every matrix: features neither vanish nor overflow in bf16 at these widths
# Of black-forest-labs/FLUX.1-dev and Qwen/Qwen-Image-Edit.
_FLUX_SCHEDULER = {
    "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip
_QWEN_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip


def register() -> None:
    """Make the random generators known to ``load_policy``; importing does nothing by itself."""
    for family, policy in POLICY_CLASSES.items():
        loading.POLICIES[f"Random:{family}"] = f"{__name__}:{policy.__name__}"


def write(architecture: Architecture, folder: Path) -> Path:
    """A model folder with everything but weights, which are made when it is loaded; kept if it is there already."""
    if (folder / "model_index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(architecture), indent=1))
    for name, part in pipeline_of(architecture, torch.float32, "meta").components.items():
        if hasattr(part, "save_config"):  # diffusers' modules and schedulers
            part.save_config(folder / name)
        elif isinstance(part, PreTrainedModel):
            part.config.save_pretrained(folder / name)
        elif isinstance(part, PreTrainedTokenizerBase):
            part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": f"Random:{architecture.family}"}))
    return folder


# --- pipelines --------------------------------------------------------------------------------------------------------

_shared: dict[tuple, DiffusionPipeline] | None = None  # None: every generator has weights of its own


@contextmanager
def shared_weights() -> Iterator[None]:
    """Inside, generators of equal architecture, precision and device share the memory of their frozen weights.

    For runs that take turns in one process. Each has modules (and adapters) of its own, so that one may be compiled or
    wrapped and another not; the weights made first stay where they are until the block ends.
    """
    global _shared
    _shared = {}
    try:
        yield
    finally:
        _shared = None


def pipeline_of(architecture: Architecture, dtype: torch.dtype, device: torch.device | str) -> DiffusionPipeline:
    """The whole pipeline with random weights; the VAE in float32, as policies want it.

    Args:
        architecture: What to make.
        dtype: Of transformer and text encoders.
        device: Where; ``meta`` for shapes alone.
    """
    if _shared is None:
        return _build(architecture, dtype, torch.device(device))
    key = (repr(architecture), dtype, str(device))
    if key not in _shared:
        _shared[key] = _build(architecture, dtype, torch.device(device))
    parts = {name: _twin(part) for name, part in _shared[key].components.items() if part is not None}
    return type(_shared[key])(**parts)


def _twin(part: object) -> object:
    """A copy whose parameters have memory in common with those of ``part``."""
    if not isinstance(part, nn.Module):
        return part
    memo = {id(p): nn.Parameter(p.data, requires_grad=False) for p in part.parameters()}
    return copy.deepcopy(part, memo)


def _build(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    with device:
        modules = _qwen_modules(architecture, dtype) if architecture.vision else _flux_modules(architecture, dtype)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(architecture.seed)
    for module in modules.values():
        module.requires_grad_(False).eval()
        if generator is not None:
            _randomise(module, generator)
    if architecture.vision:
        return _qwen_pipeline(modules)
    kind = FluxKontextPipeline if architecture.family == "flux_kontext" else FluxPipeline
    clip, text = architecture.clip, architecture.text
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(**_FLUX_SCHEDULER),
        tokenizer=piece_tokenizer("<s> $A </s>", clip["max_position_embeddings"], clip["vocab_size"]),
        tokenizer_2=piece_tokenizer("$A </s>", 512, text["vocab_size"]),
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
    # ids of the special tokens: their places in words.QWEN_SPECIAL
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
    bare = QwenImageEditPipeline(scheduler=scheduler, tokenizer=None, processor=None, **modules)
    tokenizer = qwen_tokenizer([bare.prompt_template_encode])
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes), chat_template=""
    )
    return QwenImageEditPipeline(scheduler=scheduler, tokenizer=tokenizer, processor=processor, **modules)


@torch.no_grad()
def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, _STD, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)  # scales of norms


# --- policies ---------------------------------------------------------------------------------------------------------


class RandomPipeline:
    """In the place of a pipeline class: ``from_pretrained`` makes the weights, on this process's device."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype) -> DiffusionPipeline:
        """The pipeline of the architecture in folder ``path``."""
        return pipeline_of(Architecture.read(path), dtype, PartialState().device)


class RandomFluxPolicy(FluxPolicy):
    """FLUX.1 text to image with random weights."""

    pipeline_class = RandomPipeline


class RandomKontextPolicy(FluxKontextPolicy):
    """FLUX.1 Kontext with random weights."""

    pipeline_class = RandomPipeline


class RandomQwenEditPolicy(QwenImageEditPolicy):
    """Qwen-Image-Edit with random weights."""

    pipeline_class = RandomPipeline


POLICY_CLASSES = {
    "flux": RandomFluxPolicy,
    "flux_kontext": RandomKontextPolicy,
    "qwen_image_edit": RandomQwenEditPolicy,
}
