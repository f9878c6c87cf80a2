"""Shapes of generators: the real ones from their published configurations, and smaller ones of the same kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Architecture:
    """Keyword arguments for the parts of a generator.

    Attributes:
        family: flux | flux_kontext | qwen_image_edit.
        transformer: For FluxTransformer2DModel or QwenImageTransformer2DModel.
        text: For T5Config, or for the text half of Qwen2_5_VLConfig.
        vae: For AutoencoderKL or AutoencoderKLQwenImage.
        clip: For CLIPTextConfig (FLUX).
        vision: For the vision half of Qwen2_5_VLConfig (Qwen-Image-Edit).
        seed: Seed of random weights.
    """

    family: str
    transformer: dict[str, Any]
    text: dict[str, Any]
    vae: dict[str, Any]
    clip: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def scaled(self, blocks: float = 1.0, width: float = 1.0) -> Architecture:
        """The same architecture with a fraction of the blocks and of the attention heads, at least one of each."""
        if blocks == width == 1.0:
            return self
        transformer, text, clip, vision = (dict(part) for part in (self.transformer, self.text, self.clip, self.vision))
        for part in (transformer, text, clip):
            for name in ("num_layers", "num_single_layers", "num_hidden_layers"):
                if name in part:
                    part[name] = _share(part[name], blocks)
        transformer["num_attention_heads"] = _share(transformer["num_attention_heads"], width)
        if self.family == "qwen_image_edit":
            if width != 1.0:
                raise ValueError("--width works for FLUX only; Qwen-Image-Edit takes --blocks")
            vision["depth"] = _share(vision["depth"], blocks)
            vision["fullatt_block_indexes"] = [i for i in vision["fullatt_block_indexes"] if i < vision["depth"]] or [0]
        else:
            text["num_heads"] = _share(text["num_heads"], width)
            text["d_model"] = text["num_heads"] * text["d_kv"]
            text["d_ff"] = _share(text["d_ff"], width)
            transformer["joint_attention_dim"] = text["d_model"]
        return dataclasses.replace(self, transformer=transformer, text=text, clip=clip, vision=vision)

    def with_blocks(self, double: int, single: int) -> Architecture:
        """The same architecture with other numbers of transformer blocks (Qwen-Image has no single blocks)."""
        transformer = self.transformer | {"num_layers": double}
        if "num_single_layers" in transformer:
            transformer["num_single_layers"] = single
        return dataclasses.replace(self, transformer=transformer)


def _share(count: int, fraction: float) -> int:
    return max(1, round(count * fraction))


_FLUX_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
    "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159,
}  # fmt: skip

FLUX_DEV = Architecture(
    family="flux",
    transformer={
        "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
        "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
    },
    text={  # T5 1.1 XXL, the encoder
        "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0,
    },
    clip={  # CLIP ViT-L/14, the text half
        "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 77,
    },
    vae=_FLUX_VAE,
)  # fmt: skip

KONTEXT_DEV = dataclasses.replace(FLUX_DEV, family="flux_kontext")

QWEN_EDIT = Architecture(
    family="qwen_image_edit",
    transformer={
        "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
        "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
    },
    text={  # Qwen2.5-VL-7B-Instruct
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    vision={
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    vae={"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
         "temperal_downsample": [False, True, True]},
)  # fmt: skip


def _narrow(heads: int, head_dim: int, double: int, single: int, channels: list[int]) -> Architecture:
    """FLUX small enough for a CPU: heads·head_dim wide, 4 latent channels."""
    width = heads * head_dim
    rope = [head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8]
    return Architecture(
        family="flux",
        transformer=FLUX_DEV.transformer
        | {
            "in_channels": 16, "num_layers": double, "num_single_layers": single, "attention_head_dim": head_dim,
            "num_attention_heads": heads, "joint_attention_dim": width, "pooled_projection_dim": width,
            "axes_dims_rope": rope,
        },
        text=FLUX_DEV.text | {"d_model": width, "d_kv": head_dim, "d_ff": 2 * width, "num_layers": 2, "num_heads": heads},
        clip=FLUX_DEV.clip
        | {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "num_attention_heads": heads},
        vae=_FLUX_VAE
        | {
            "down_block_types": ["DownEncoderBlock2D"] * len(channels), "block_out_channels": channels,
            "up_block_types": ["UpDecoderBlock2D"] * len(channels), "layers_per_block": 1, "latent_channels": 4,
            "norm_num_groups": 4, "mid_block_add_attention": False,
        },
    )  # fmt: skip


# A token is 16 pixels wide, as in FLUX.1-dev; 8 in ``tiny``, whose VAE has one level less.
PRESETS: dict[str, Architecture] = {
    "tiny": _narrow(2, 16, 2, 2, [4, 8, 8]),
    "narrow": _narrow(4, 32, 2, 3, [8, 8, 16, 16]),  # the toy's width with FLUX.1-dev's token counts
    "flux-small": FLUX_DEV.scaled(blocks=0.1, width=0.125),
    "flux-dev": FLUX_DEV,
    "kontext-dev": KONTEXT_DEV,
    "qwen-edit": QWEN_EDIT,
}
