"""Shapes of the published generators: pipelines without weights, or with random ones.

To add a generator, add one ``Architecture`` to ``KNOWN``: the pipeline, and what the published
``config.json`` of its parts says other than the defaults of their classes. Check it by its number
of parameters (tests/test_estimate.py).
"""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

from paco_grpo.options import ConfigError
from paco_grpo.policies import Policy, PolicySettings
from paco_grpo.policies.loading import pipeline_class, policy_of
from paco_grpo.policies.models import part_classes


@dataclass(frozen=True)
class Tokens:
    """A tokenizer that needs no download."""

    # Tokens with the ids 0, 1, …; the first one pads; "<unk>" is among them.
    special: tuple[str, ...]
    template: str = "$A"  # special tokens around the text
    length: int = 131072
    chat_template: str = ""
    processor: str = ""  # what is built around it: "qwen2_vl", "qwen3_vl" or "pixtral"


@dataclass(frozen=True)
class Architecture:
    """What a pipeline is made of, by the names of its arguments."""

    pipeline: str  # class of diffusers
    modules: dict[str, tuple[str, dict[str, Any]]]  # class, and values of its configuration
    tokenizers: dict[str, Tokens]


_SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
_CLIP_TOKENS = Tokens(_SPECIAL, "<s> $A </s>", 77)
_T5_TOKENS = Tokens(_SPECIAL, "$A </s>", 512)
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)
_QWEN_TOKENS = Tokens(_QWEN_SPECIAL)
_QWEN_CHAT = Tokens(
    _QWEN_SPECIAL,
    chat_template="{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>"
    "{% endfor %}<|im_start|>",
)
_QWEN3_VL_TOKENS = Tokens(
    _QWEN_SPECIAL,
    chat_template="{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content[0].text }}<|im_end|>\n{% endfor %}",
    processor="qwen3_vl",
)
_MISTRAL_TOKENS = Tokens(
    (*_SPECIAL, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    chat_template="<s>{% for message in messages %}{{ message.content[0].text }} {% endfor %}",
    processor="pixtral",
)

# The text half of ViT-L/14.
_CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 3,
}
# The text half of ViT-bigG/14.
_CLIP_G = _CLIP_L | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
# The encoder of T5 1.1.
_T5_XXL = (
    "T5EncoderModel",
    {
        "d_model": 4096,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
)
# Places in _QWEN_SPECIAL.
_VISION_IDS = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 6,
    "video_token_id": 7,
}
_QWEN2_5_VL_7B = (
    "Qwen2_5_VLForConditionalGeneration",
    _VISION_IDS
    | {
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {"hidden_size": 1280},
    },
)
_QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN3_8B = _QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288}
_ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]}
_QWEN3_VL_4B = _VISION_IDS | {
    "text_config": _QWEN3_4B | {"rope_parameters": _ROPE},
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
_QWEN3_VL_8B = _VISION_IDS | {
    "text_config": _QWEN3_8B | {"rope_parameters": _ROPE},
    "vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
}
# Also of Stable Diffusion 3.5, except for the scaling.
_FLUX_VAE = (
    "AutoencoderKL",
    {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
)


def _flux1(pipeline: str) -> Architecture:
    modules = {
        "transformer": ("FluxTransformer2DModel", {"guidance_embeds": True}),
        "text_encoder": ("CLIPTextModel", _CLIP_L),
        "text_encoder_2": _T5_XXL,
        "vae": _FLUX_VAE,
    }
    return Architecture(pipeline, modules, {"tokenizer": _CLIP_TOKENS, "tokenizer_2": _T5_TOKENS})


def _qwen_image(pipeline: str, **transformer: Any) -> Architecture:
    modules = {
        "transformer": ("QwenImageTransformer2DModel", transformer),
        "text_encoder": _QWEN2_5_VL_7B,
        "vae": ("AutoencoderKLQwenImage", {}),
    }
    tokenizers = {"tokenizer": _QWEN_TOKENS}
    if "Edit" in pipeline:
        tokenizers["processor"] = dataclasses.replace(_QWEN_TOKENS, processor="qwen2_vl")
    return Architecture(pipeline, modules, tokenizers)


def _longcat(pipeline: str) -> Architecture:
    modules = {
        "transformer": (
            "LongCatImageTransformer2DModel",
            {"num_layers": 10, "num_single_layers": 20},
        ),
        "text_encoder": _QWEN2_5_VL_7B,
        "vae": _FLUX_VAE,
    }
    processor = dataclasses.replace(_QWEN_TOKENS, processor="qwen2_vl")
    return Architecture(pipeline, modules, {"tokenizer": _QWEN_TOKENS, "text_processor": processor})


def _flux2(
    pipeline: str, transformer: dict[str, Any], text_encoder: tuple[str, dict], tokens: Tokens
) -> Architecture:
    modules = {
        "transformer": ("Flux2Transformer2DModel", transformer),
        "text_encoder": text_encoder,
        "vae": ("AutoencoderKLFlux2", {}),
    }
    return Architecture(pipeline, modules, {"tokenizer": tokens})


def _klein(transformer: dict[str, int], qwen3: dict[str, Any]) -> Architecture:
    """FLUX.2 Klein, not distilled."""
    transformer = transformer | {
        "joint_attention_dim": 3 * qwen3["hidden_size"],
        "guidance_embeds": False,
    }
    return _flux2("Flux2KleinPipeline", transformer, ("Qwen3ForCausalLM", qwen3), _QWEN_CHAT)


def _sd35(layers: int, positions: int, dual: int) -> Architecture:
    """Stable Diffusion 3.5; the first ``dual`` blocks have a second attention."""
    transformer = {
        "num_layers": layers,
        "num_attention_heads": layers,
        "caption_projection_dim": 64 * layers,
        "pos_embed_max_size": positions,
        "dual_attention_layers": list(range(dual)),
        "qk_norm": "rms_norm",
    }
    modules = {
        "transformer": ("SD3Transformer2DModel", transformer),
        "text_encoder": ("CLIPTextModelWithProjection", _CLIP_L | {"projection_dim": 768}),
        "text_encoder_2": ("CLIPTextModelWithProjection", _CLIP_G),
        "text_encoder_3": _T5_XXL,
        "vae": _FLUX_VAE,
    }
    tokenizers = {
        "tokenizer": _CLIP_TOKENS,
        "tokenizer_2": _CLIP_TOKENS,
        "tokenizer_3": _T5_TOKENS,
    }
    return Architecture("StableDiffusion3Pipeline", modules, tokenizers)


_FLUX2_DEV = _flux2(
    "Flux2Pipeline",
    {},
    # Mistral-Small-3.2-24B
    ("Mistral3ForConditionalGeneration", {"image_token_index": 4, "tie_word_embeddings": False}),
    _MISTRAL_TOKENS,
)
_Z_IMAGE = Architecture(
    "ZImagePipeline",
    {
        "transformer": ("ZImageTransformer2DModel", {}),
        "text_encoder": ("Qwen3Model", _QWEN3_4B),
        "vae": _FLUX_VAE,
    },
    {"tokenizer": _QWEN_CHAT},
)
_KREA_2 = Architecture(
    "Krea2Pipeline",
    {
        "transformer": ("Krea2Transformer2DModel", {}),
        "text_encoder": ("Qwen3VLModel", _QWEN3_VL_4B),
        "vae": ("AutoencoderKLQwenImage", {}),
    },
    {"tokenizer": _QWEN_TOKENS},
)
_QWEN_IMAGE_21 = Architecture(
    "QwenImage21Pipeline",
    {
        "transformer": ("QwenImage21Transformer2DModel", {}),
        "text_encoder": ("Qwen3VLForConditionalGeneration", _QWEN3_VL_8B),
        "vae": ("AutoencoderKLQwenImage21", {}),
    },
    {"processor": _QWEN3_VL_TOKENS},
)


# Generators: hub name -> architecture.
KNOWN = {
    "black-forest-labs/FLUX.1-dev": _flux1("FluxPipeline"),
    "black-forest-labs/FLUX.1-Kontext-dev": _flux1("FluxKontextPipeline"),
    "Qwen/Qwen-Image": _qwen_image("QwenImagePipeline"),
    "Qwen/Qwen-Image-2512": _qwen_image("QwenImagePipeline"),
    "Qwen/Qwen-Image-Edit": _qwen_image("QwenImageEditPipeline"),
    "Qwen/Qwen-Image-Edit-2509": _qwen_image("QwenImageEditPlusPipeline"),
    "Qwen/Qwen-Image-Edit-2511": _qwen_image("QwenImageEditPlusPipeline", zero_cond_t=True),
    "Qwen/Qwen-Image-2.1": _QWEN_IMAGE_21,
    "krea/Krea-2-Raw": _KREA_2,
    "krea/Krea-2-Turbo": _KREA_2,
    "meituan-longcat/LongCat-Image": _longcat("LongCatImagePipeline"),
    "meituan-longcat/LongCat-Image-Edit": _longcat("LongCatImageEditPipeline"),
    "stabilityai/stable-diffusion-3.5-medium": _sd35(24, 384, 13),
    "stabilityai/stable-diffusion-3.5-large": _sd35(38, 192, 0),
    "Tongyi-MAI/Z-Image": _Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": _Z_IMAGE,
    "black-forest-labs/FLUX.2-dev": _FLUX2_DEV,
    "black-forest-labs/FLUX.2-klein-base-4B": _klein(
        {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24},
        _QWEN3_4B | {"tie_word_embeddings": True},
    ),
    "black-forest-labs/FLUX.2-klein-base-9B": _klein(
        {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32},
        _QWEN3_8B | {"tie_word_embeddings": False},
    ),
}


def class_of(model: str) -> type[DiffusionPipeline]:
    """The pipeline class of a hub name in ``KNOWN``, or of a local folder.

    Raises:
        ConfigError: ``model`` is neither.
        PolicyLoadError: diffusers does not have the folder's pipeline.
    """
    if model in KNOWN:
        return getattr(diffusers, KNOWN[model].pipeline)
    if not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"{model!r} is not known here: give a pipeline folder, or one of {', '.join(KNOWN)}"
        )
    return pipeline_class(model)


def pipeline_of(
    model: str, dtype: torch.dtype, device: torch.device | str = "meta"
) -> DiffusionPipeline:
    """The pipeline of a hub name in ``KNOWN``, or of a local folder, without its weights.

    Args:
        dtype: Data type of transformer and text encoders; the VAE is float32, as policies expect
            it.

    Raises: As ``class_of``.
    """
    pipeline = class_of(model)
    if model in KNOWN:
        known = KNOWN[model]
        modules = {name: module_of(model, name, dtype, device) for name in known.modules}
        tokenizers = {name: _tokenizer(tokens) for name, tokens in known.tokenizers.items()}
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)  # its values do not matter to shapes
        return pipeline(scheduler=scheduler, **modules, **tokenizers)
    folder = Path(model).expanduser()
    modules = {}
    index = DiffusionPipeline.load_config(folder)
    for name, part_class in part_classes(index, folder).items():
        if not issubclass(part_class, nn.Module):
            continue
        if hasattr(part_class, "load_config"):
            config = part_class.load_config(folder / name)
        else:
            config = part_class.config_class.from_pretrained(folder / name)
        modules[name] = _module(part_class.__name__, config, dtype, device)
    return pipeline.from_pretrained(folder, **modules)


def module_of(model: str, name: str, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """One part of a model in ``KNOWN``, with its class's own initial weights."""
    class_name, config = KNOWN[model].modules[name]
    return _module(class_name, config, dtype, device)


def _module(
    class_name: str, config: Any, dtype: torch.dtype, device: torch.device | str
) -> nn.Module:
    """``config``: values, or a configuration of transformers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if class_name.startswith("Autoencoder") else dtype)
    try:
        with torch.device(device):
            if hasattr(diffusers, class_name):
                return getattr(diffusers, class_name).from_config(config)
            module_class = getattr(transformers, class_name)
            if isinstance(config, dict):
                config = module_class.config_class(**config)
            return module_class(config)
    finally:
        torch.set_default_dtype(before)


def _tokenizer(tokens: Tokens) -> Any:
    """Gives about as many tokens as the real one; every piece of text is ``<unk>``."""
    vocabulary = {token: i for i, token in enumerate(tokens.special)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # About 1.5 pieces per word with punctuation, close to what real tokenizers need for English.
    pieces = Regex(r"\w{1,8}|[^\w\s]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=tokens.template, special_tokens=list(vocabulary.items())
    )
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=tokens.special[0],
        unk_token="<unk>",
        model_max_length=tokens.length,
        additional_special_tokens=list(tokens.special),
        chat_template=tokens.chat_template or None,
    )
    if tokens.processor == "pixtral":
        images = transformers.PixtralImageProcessor()
        return transformers.PixtralProcessor(
            images, fast_tokenizer, chat_template=tokens.chat_template
        )
    if tokens.processor == "qwen2_vl":
        images = transformers.Qwen2VLImageProcessor()
        videos = transformers.Qwen2VLVideoProcessor()
        return transformers.Qwen2VLProcessor(images, fast_tokenizer, videos, chat_template="")
    if tokens.processor == "qwen3_vl":
        images = transformers.Qwen2VLImageProcessor(patch_size=16)
        videos = transformers.Qwen3VLVideoProcessor()
        return transformers.Qwen3VLProcessor(
            images, fast_tokenizer, videos, chat_template=tokens.chat_template
        )
    return fast_tokenizer


def write(model: str, folder: Path) -> Path:
    """Write a folder of the known ``model`` with all but weights (for ``random_weights``)."""
    pipeline = pipeline_of(model, torch.float32)
    for name, part in pipeline.components.items():
        if hasattr(part, "save_config"):  # diffusers' modules and schedulers
            part.save_config(folder / name)
        elif isinstance(part, nn.Module):
            part.config.save_pretrained(folder / name)
        elif part is not None:
            part.save_pretrained(folder / name)
    pipeline.save_config(folder)
    return folder


def fill_randomly(module: nn.Module) -> None:
    """Weights with which activations neither vanish nor overflow in bfloat16."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.02)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)


_DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")


@contextmanager
def with_blocks(model: str, count: int) -> Iterator[None]:
    """Inside the block, the transformer of ``model`` has ``count`` blocks of each kind.

    Its width is the real one.
    """
    modules = KNOWN[model].modules
    class_name, config = modules["transformer"]
    parameters = inspect.signature(getattr(diffusers, class_name)).parameters
    depths = {name: count for name in _DEPTHS if name in parameters}
    if config.get("dual_attention_layers"):
        depths["dual_attention_layers"] = list(range(count // 2 + 1))
    with mock.patch.dict(modules, transformer=(class_name, config | depths)):
        yield


@contextmanager
def random_weights(model: str) -> Iterator[None]:
    """Inside the block, the policy of ``model`` has random weights and loads none."""
    policy = policy_of(class_of(model))

    def from_pretrained(path: Path, settings: PolicySettings) -> Policy:
        pipeline = pipeline_of(model, settings.dtype, PartialState().device)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                fill_randomly(part)
        return policy(pipeline, settings)

    with mock.patch.object(policy, "from_pretrained", from_pretrained):
        yield
