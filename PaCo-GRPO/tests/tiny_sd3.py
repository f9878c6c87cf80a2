"""A Stable Diffusion 3.5 pipeline folder with tiny random weights: the real classes, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tiny_flux import build_vae, clip_config, t5_config, tokenizer
from transformers import CLIPTextModelWithProjection, T5EncoderModel


def build_tiny_sd3(directory: str | Path, *, seed: int = 0, blocks: int = 2, dual: bool = True) -> Path:
    """Write a ``StableDiffusion3Pipeline`` folder and return it; images are multiples of 8 pixels.

    Args:
        dual: With a second attention in the first block, as 3.5 medium has in many.
    """
    torch.manual_seed(seed)
    clips = []
    for width in (16, 24):
        config = clip_config(width, layers=2)
        config.projection_dim = width
        clips.append(CLIPTextModelWithProjection(config))
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=blocks,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=48,
        pooled_projection_dim=16 + 24,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        dual_attention_layers=(0,) if dual else (),
    )
    vae = build_vae(use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609)
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clips[0],
        tokenizer=tokenizer("<s> $A </s>", model_max_length=48),
        text_encoder_2=clips[1],
        tokenizer_2=tokenizer("<s> $A </s>", model_max_length=48),
        text_encoder_3=T5EncoderModel(t5_config(48)),
        tokenizer_3=tokenizer("$A </s>", model_max_length=512),
        transformer=transformer,
    )
    pipeline.save_pretrained(directory)
    return Path(directory)
