"""Which layers of a LoRA ComfyUI loads: its names of each transformer, and what was tried.

ComfyUI skips a layer that it does not know and says so only in its own log, so the images are
silently others. It takes the names of diffusers with the prefix ``transformer.`` and, without an
``alpha`` in the file, the scale 1, as ``adapters.save_diffusers`` writes them. The names are facts
of its source (comfy/lora.py and comfy/utils.py, read in 2026).
"""

import re
from typing import NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer

from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import TRAINED

_ATTENTION = r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)"
_NORMS = r"norm1(_context)?\.linear"
_AROUND = r"x_embedder|context_embedder|norm_out\.linear|proj_out"
_FEED_FORWARD = r"ff(_context)?\.(net\.0\.proj|net\.2)"
_TIME_AND_TEXT = r"time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]"


class Names(NamedTuple):
    """What ComfyUI loads of a transformer."""

    layers: str  # regular expression for whole names of layers
    tried: str  # with which models, and how, for model cards


# Class of the transformer → its names. Others are not known.
NAMES = {
    "FluxTransformer2DModel": Names(
        rf"transformer_blocks\.\d+\.({_ATTENTION}|{_FEED_FORWARD}|{_NORMS})|"
        r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out|norm\.linear)|"
        rf"{_AROUND}|{_TIME_AND_TEXT}",
        "FLUX.1 in ComfyUI's model code of November 2025 (its velocity equals diffusers' up to "
        "1e-5), FLUX.1 Kontext by the names of layers alone",
    ),
    "Flux2Transformer2DModel": Names(
        rf"transformer_blocks\.\d+\.({_ATTENTION}|ff(_context)?\.linear_(in|out))|"
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)|"
        rf"{_AROUND}",
        "FLUX.2 Klein in ComfyUI's model code of November 2025 (its velocity equals diffusers' "
        "up to 4e-7), FLUX.2-dev by the names of layers alone",
    ),
    "Krea2Transformer2DModel": Names(
        r"(transformer_blocks|text_fusion\.(layerwise|refiner)_blocks)\.\d+\."
        r"(attn\.(to_[qkv]|to_gate|to_out\.0)|ff\.(gate|up|down))|"
        r"img_in|time_embed\.linear_[12]|time_mod_proj|txt_in\.linear_[12]|"
        r"text_fusion\.projector|final_layer\.linear",
        "Krea 2 by the names of layers alone",
    ),
    "QwenImageTransformer2DModel": Names(
        r".+",
        "Qwen-Image in ComfyUI's model code of November 2025 (its velocity equals diffusers' up "
        "to 7e-7), the editors by the names of layers alone",
    ),
    "QwenImage21Transformer2DModel": Names(r".+", "Qwen-Image-2.1 by the names of layers alone"),
    "SD3Transformer2DModel": Names(
        rf"transformer_blocks\.\d+\.({_ATTENTION}|attn2\.(to_[qkv]|to_out\.0)|{_FEED_FORWARD}|"
        rf"{_NORMS})|context_embedder|norm_out\.linear|proj_out|{_TIME_AND_TEXT}",
        "Stable Diffusion 3.5 by the names of layers alone",
    ),
    "ZImageTransformer2DModel": Names(
        r"(layers|context_refiner|noise_refiner)\.\d+\."
        r"(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123]|adaLN_modulation\.0)|"
        r"all_x_embedder\.2-1|all_final_layer\.2-1\..+|cap_embedder\.1|t_embedder\.mlp\.[02]",
        "Z-Image by the names of layers alone",
    ),
}


def names_of(policy: Policy) -> Names | None:
    """What ComfyUI loads of the transformer; None where that is not known."""
    for base in type(policy.transformer).__mro__:  # the class of a sharded one has it as a base
        if base.__name__ in NAMES:
            return NAMES[base.__name__]
    return None


def skipped_layers(policy: Policy) -> str | None:
    """A sentence on the layers of the trained LoRA that ComfyUI is known to skip; None: on none."""
    names = names_of(policy)
    if names is None:
        return None
    layers = []
    for name, module in policy.transformer.named_modules():
        if isinstance(module, BaseTunerLayer) and TRAINED in module.scaling:
            layers.append(name)
    skipped = [name for name in layers if not re.fullmatch(names.layers, name)]
    if not skipped:
        return None
    return (
        f"ComfyUI skips {len(skipped)} of this LoRA's {len(layers)} layers without an error, "
        f"such as {skipped[0]}, so its images are others"
    )
