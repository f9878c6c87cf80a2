"""Shapes of the published generators, from their configurations: pipelines without weights, or with random ones.

To add a generator, add one ``Architecture`` to ``KNOWN``: the pipeline, its modules with the arguments of their published
``config.json`` (without defaults), its scheduler and its tokenizers. Check the row by its number of parameters
(tests/test_estimate.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from transformers import PreTrainedTokenizerFast


class UnknownModelError(ValueError):
    """The architecture of a model is not known; the message lists those that are."""


@dataclass(frozen=True)
class Module:
    """One network of a pipeline.

    Attributes:
        kind: Class of diffusers or transformers.
        config: Keyword arguments of diffusers' class, or of the configuration of transformers' class; such as
            ``text_config``, parts of it are dictionaries again.
    """

    kind: str
    config: dict[str, Any]

    def changed(self, **more: Any) -> Module:
        """With other values in ``config``, also within its dictionaries."""
        return dataclasses.replace(self, config=_merged(self.config, more))


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return values | {k: _merged(values[k], v) if isinstance(v, dict) and k in values else v for k, v in more.items()}


@dataclass(frozen=True)
class Tokens:
    """A tokenizer, which would have to be downloaded: it gives about as many tokens as the real one.

    Attributes:
        special: Tokens with the ids 0, 1, …; the first one pads; ``<unk>`` is among them.
        template: Special tokens around the text ``$A``.
        length: ``model_max_length``.
        chat_template: Jinja, for pipelines that call ``apply_chat_template``.
        processor: Empty for the tokenizer itself, else what is built around it: ``qwen2_vl`` or ``pixtral``.
    """

    special: tuple[str, ...]
    template: str = "$A"
    length: int = 131072
    chat_template: str = ""
    processor: str = ""


@dataclass(frozen=True, eq=False)
class Architecture:
    """What a pipeline is made of.

    Attributes:
        pipeline: Class of diffusers.
        modules: By the pipeline's argument; one is the ``transformer``, one the ``vae``.
        scheduler: Arguments of FlowMatchEulerDiscreteScheduler.
        tokenizers: By the pipeline's argument.
        others: Further arguments of the pipeline.
        hub: Names of models with this architecture on the hub.
    """

    pipeline: str
    modules: dict[str, Module]
    scheduler: dict[str, Any]
    tokenizers: dict[str, Tokens]
    others: dict[str, Any] = field(default_factory=dict)
    hub: tuple[str, ...] = ()

    def with_modules(self, **modules: dict[str, Any]) -> Architecture:
        """The same architecture with other values in the configurations of ``modules``."""
        changed = {name: self.modules[name].changed(**config) for name, config in modules.items()}
        return dataclasses.replace(self, modules=self.modules | changed)


_SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
_FLUX_VAE = Module("AutoencoderKL", {
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159,
})  # fmt: skip
CLIP_L = Module("CLIPTextModel", {  # ViT-L/14, the text half
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 77, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3,
})  # fmt: skip
T5_XXL = Module("T5EncoderModel", {  # T5 1.1, the encoder
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
})  # fmt: skip
CLIP_TOKENS = Tokens(_SPECIAL, "<s> $A </s>", 77)
T5_TOKENS = Tokens(_SPECIAL, "$A </s>", 512)

FLUX_DEV = Architecture(
    pipeline="FluxPipeline",
    modules={
        "transformer": Module("FluxTransformer2DModel", {
            "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
            "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
            "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
        }),
        "text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "vae": _FLUX_VAE,
    },
    scheduler={
        "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
    tokenizers={"tokenizer": CLIP_TOKENS, "tokenizer_2": T5_TOKENS},
    hub=("black-forest-labs/FLUX.1-dev",),
)  # fmt: skip

KONTEXT_DEV = dataclasses.replace(
    FLUX_DEV, pipeline="FluxKontextPipeline", hub=("black-forest-labs/FLUX.1-Kontext-dev",)
)

QWEN_TOKENS = Tokens((
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<unk>",
))  # fmt: skip
QWEN2_5_VL_7B = Module("Qwen2_5_VLForConditionalGeneration", {  # ids of the special tokens: places in QWEN_TOKENS
    "vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 6, "video_token_id": 7,
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
})  # fmt: skip


def _qwen3_vl(
    hidden: int, intermediate: int, depth: int, width: int, mlp: int, deepstack: list[int], tied: bool
) -> Module:
    """A Qwen3-VL. ``width`` and ``mlp``: of the vision tower, whose layers ``deepstack`` reach the text's first ones."""
    ids = {key: value for key, value in QWEN2_5_VL_7B.config.items() if key.endswith("_token_id")}
    return Module("Qwen3VLForConditionalGeneration", ids | {
        "tie_word_embeddings": tied,
        "text_config": {
            "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
            "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        },
        "vision_config": {
            "depth": depth, "hidden_size": width, "intermediate_size": mlp, "num_heads": 16, "out_hidden_size": hidden,
            "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": deepstack,
        },
    })  # fmt: skip


QWEN3_VL_4B = _qwen3_vl(2560, 9728, 24, 1024, 4096, [5, 11, 17], tied=True)
QWEN3_VL_8B = _qwen3_vl(4096, 12288, 27, 1152, 4304, [8, 16, 24], tied=False)

QWEN_EDIT = Architecture(
    pipeline="QwenImageEditPipeline",
    modules={
        "transformer": Module("QwenImageTransformer2DModel", {
            "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
            "num_attention_heads": 24, "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
        }),
        "text_encoder": QWEN2_5_VL_7B,
        "vae": Module("AutoencoderKLQwenImage", {
            "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
        }),
    },
    scheduler={
        "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
        "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential",
    },
    tokenizers={"tokenizer": QWEN_TOKENS, "processor": dataclasses.replace(QWEN_TOKENS, processor="qwen2_vl")},
    hub=("Qwen/Qwen-Image-Edit",),
)  # fmt: skip

# The same networks: Qwen/Qwen-Image has Qwen-Image-Edit's configuration, 2511 one more value.
QWEN_IMAGE = dataclasses.replace(
    QWEN_EDIT, pipeline="QwenImagePipeline", tokenizers={"tokenizer": QWEN_TOKENS},
    hub=("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
)  # fmt: skip
QWEN_EDIT_2509 = dataclasses.replace(
    QWEN_EDIT, pipeline="QwenImageEditPlusPipeline", hub=("Qwen/Qwen-Image-Edit-2509",)
)
QWEN_EDIT_2511 = dataclasses.replace(
    QWEN_EDIT_2509.with_modules(transformer={"zero_cond_t": True}), hub=("Qwen/Qwen-Image-Edit-2511",)
)

_FLUX2_SCHEDULER = {"use_dynamic_shifting": True, "shift": 3.0}  # the pipelines compute the shift from tokens and steps
_FLUX2_VAE = Module("AutoencoderKLFlux2", {})  # the class's defaults
_QWEN3_CHAT = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"


def _klein(double: int, single: int, heads: int, hub: str, **text: Any) -> Architecture:
    """FLUX.2 Klein, not distilled; ``text`` changes Qwen3-4B."""
    qwen3 = {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    qwen3 |= text
    return Architecture(
        pipeline="Flux2KleinPipeline",
        modules={
            "transformer": Module("Flux2Transformer2DModel", {
                "num_layers": double, "num_single_layers": single, "num_attention_heads": heads,
                "joint_attention_dim": 3 * qwen3["hidden_size"], "guidance_embeds": False,
            }),
            "text_encoder": Module("Qwen3ForCausalLM", qwen3), "vae": _FLUX2_VAE,
        },
        scheduler=_FLUX2_SCHEDULER,
        tokenizers={"tokenizer": dataclasses.replace(QWEN_TOKENS, chat_template=_QWEN3_CHAT)},
        hub=(hub,),
    )  # fmt: skip


KLEIN_4B = _klein(5, 20, 24, "black-forest-labs/FLUX.2-klein-base-4B")
KLEIN_9B = _klein(
    8, 24, 32, "black-forest-labs/FLUX.2-klein-base-9B",
    hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False,
)  # fmt: skip

FLUX2_DEV = Architecture(
    pipeline="Flux2Pipeline",
    modules={
        "transformer": Module("Flux2Transformer2DModel", {"num_layers": 8, "num_single_layers": 48}),
        "text_encoder": Module("Mistral3ForConditionalGeneration", {  # Mistral-Small-3.2-24B
            "image_token_index": 4, "tie_word_embeddings": False,
            "text_config": {
                "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
                "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "max_position_embeddings": 131072,
            },
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14,
            },
        }),
        "vae": _FLUX2_VAE,
    },
    scheduler=_FLUX2_SCHEDULER,
    tokenizers={
        "tokenizer": Tokens(
            (*_SPECIAL, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
            chat_template="<s>{% for message in messages %}{{ message.content[0].text }} {% endfor %}",
            processor="pixtral",
        )
    },
    hub=("black-forest-labs/FLUX.2-dev",),
)  # fmt: skip


_CLIP_L_PROJECTED = Module("CLIPTextModelWithProjection", CLIP_L.config | {"projection_dim": 768})
CLIP_G = Module("CLIPTextModelWithProjection", CLIP_L.config | {  # ViT-bigG/14, the text half
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
})  # fmt: skip


def _sd35(layers: int, heads: int, positions: int, dual: int, hub: str) -> Architecture:
    """Stable Diffusion 3.5; the first ``dual`` blocks have a second attention."""
    return Architecture(
        pipeline="StableDiffusion3Pipeline",
        modules={
            "transformer": Module("SD3Transformer2DModel", {
                "num_layers": layers, "num_attention_heads": heads, "caption_projection_dim": 64 * heads,
                "pos_embed_max_size": positions, "dual_attention_layers": list(range(dual)), "qk_norm": "rms_norm",
            }),
            "text_encoder": _CLIP_L_PROJECTED, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL,
            "vae": _FLUX_VAE.changed(scaling_factor=1.5305, shift_factor=0.0609),
        },
        scheduler={"shift": 3.0},
        tokenizers={"tokenizer": CLIP_TOKENS, "tokenizer_2": CLIP_TOKENS, "tokenizer_3": T5_TOKENS},
        hub=(hub,),
    )  # fmt: skip


SD35_MEDIUM = _sd35(24, 24, 384, 13, "stabilityai/stable-diffusion-3.5-medium")
SD35_LARGE = _sd35(38, 38, 192, 0, "stabilityai/stable-diffusion-3.5-large")

Z_IMAGE = Architecture(
    pipeline="ZImagePipeline",
    modules={
        "transformer": Module("ZImageTransformer2DModel", {"n_layers": 30}),  # the class's defaults
        "text_encoder": Module("Qwen3Model", {  # Qwen3-4B
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        }),
        "vae": _FLUX_VAE,
    },
    scheduler={"shift": 3.0},
    tokenizers={"tokenizer": dataclasses.replace(QWEN_TOKENS, chat_template=(
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"
    ))},
    hub=("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo"),
)  # fmt: skip


# Hub name -> architecture.
KNOWN: dict[str, Architecture] = {
    hub: architecture
    for architecture in (
        FLUX_DEV, KONTEXT_DEV, QWEN_EDIT, QWEN_IMAGE, QWEN_EDIT_2509, QWEN_EDIT_2511, SD35_MEDIUM, SD35_LARGE, Z_IMAGE,
        FLUX2_DEV, KLEIN_4B, KLEIN_9B,
    )
    for hub in architecture.hub
}  # fmt: skip


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline_of(model: str, dtype: torch.dtype, device: torch.device | str = "meta") -> DiffusionPipeline:
    """The pipeline of ``pretrained.model`` without its weights: as each class initializes them, on ``meta`` only shapes.

    Args:
        model: A hub name of ``KNOWN``, or a local pipeline folder.
        dtype: Data type of transformer and text encoders; the VAE is float32, as policies expect it.
        device: Where the parameters are created.

    Raises:
        UnknownModelError: Neither.
    """
    if (known := KNOWN.get(model)) is not None:
        return _known_pipeline(known, dtype, device)
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        raise UnknownModelError(
            f"the architecture of {model!r} is not known here: give a pipeline folder, or one of {', '.join(KNOWN)}"
        )
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts = {
        part: _component(folder / part, *entry, torch.float32 if part == "vae" else dtype, device)
        for part, entry in index.items()
        if isinstance(entry, list) and entry[0] is not None
    }
    return getattr(diffusers, index["_class_name"])(**parts)


def _component(folder: Path, module: str, class_name: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """One part of a pipeline folder from its configuration; weights are not read."""
    kind = getattr(importlib.import_module(module), class_name)
    if not issubclass(kind, nn.Module):
        return kind.from_pretrained(folder)  # scheduler, tokenizer, processor
    from_diffusers = hasattr(kind, "load_config")
    config = kind.load_config(folder) if from_diffusers else kind.config_class.from_pretrained(folder)
    with default_dtype(dtype), torch.device(device):
        return kind.from_config(config) if from_diffusers else kind(config)


def _known_pipeline(architecture: Architecture, dtype: torch.dtype, device: torch.device | str) -> DiffusionPipeline:
    with torch.device(device):
        modules = {name: _built(module, dtype) for name, module in architecture.modules.items()}
    tokenizers = {name: _tokenizer(tokens, modules) for name, tokens in architecture.tokenizers.items()}
    scheduler = FlowMatchEulerDiscreteScheduler(**architecture.scheduler)
    kind = getattr(diffusers, architecture.pipeline)
    return kind(scheduler=scheduler, **modules, **tokenizers, **architecture.others)


def _built(module: Module, dtype: torch.dtype) -> nn.Module:
    if kind := getattr(diffusers, module.kind, None):
        with default_dtype(torch.float32 if module.kind.startswith("Autoencoder") else dtype):
            return kind(**module.config)
    kind = getattr(transformers, module.kind)
    with default_dtype(dtype):
        return kind(kind.config_class(**module.config))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters that are created inside have this data type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tokenizer(tokens: Tokens, modules: dict[str, nn.Module]) -> Any:
    """Gives about as many tokens as the real one; every piece of text is ``<unk>``."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens.special)}, unk_token="<unk>"))
    # about 1.5 pieces per word with punctuation, close to what real tokenizers need for English
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w{1,8}|[^\w\s]"), behavior="removed", invert=True)
    around = [(token, i) for i, token in enumerate(tokens.special) if token in tokens.template]
    tokenizer.post_processor = processors.TemplateProcessing(single=tokens.template, special_tokens=around)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=tokens.special[0], unk_token="<unk>", model_max_length=tokens.length,
        additional_special_tokens=list(tokens.special), chat_template=tokens.chat_template or None,
    )  # fmt: skip
    if tokens.processor == "pixtral":
        return transformers.PixtralProcessor(
            transformers.PixtralImageProcessor(), made, chat_template=tokens.chat_template
        )
    if tokens.processor == "qwen2_vl":
        vision = modules["text_encoder"].config.vision_config
        sizes = {
            "patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 1280,
        }  # fmt: skip
        return transformers.Qwen2VLProcessor(
            transformers.Qwen2VLImageProcessor(**sizes), made, transformers.Qwen2VLVideoProcessor(**sizes),
            chat_template="",
        )  # fmt: skip
    return made


# --- random weights, for benchmarks -----------------------------------------------------------------------------------


def write(model: str, folder: Path) -> Path:
    """Write a folder of the known ``model`` with everything but weights; ``random_weights`` makes them at loading."""
    pipeline = pipeline_of(model, torch.float32)
    for name, part in pipeline.components.items():
        if hasattr(part, "save_config"):  # diffusers' modules and schedulers
            part.save_config(folder / name)
        elif isinstance(part, nn.Module):
            part.config.save_pretrained(folder / name)
        elif part is not None:
            part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": type(pipeline).__name__}))
    return folder


@contextmanager
def random_weights(model: str) -> Iterator[None]:
    """Inside the block, diffusers builds ``model`` with random weights instead of loading a pipeline."""

    def from_pretrained(path: Path, *, dtype: torch.dtype, **_: Any) -> DiffusionPipeline:
        pipeline = pipeline_of(model, dtype, PartialState().device)
        for module in pipeline.components.values():
            for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
                if parameter.ndim > 1:
                    parameter.data.normal_(0.0, 0.02)  # activations neither vanish nor overflow in bfloat16
                else:
                    parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        return pipeline

    with mock.patch.object(getattr(diffusers, KNOWN[model].pipeline), "from_pretrained", from_pretrained):
        yield
