"""A Z-Image pipeline folder with tiny random weights: the real classes, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tiny_flux import build_vae
from tiny_qwen_edit import qwen_tokenizer
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def build_tiny_z_image(directory: str | Path, *, seed: int = 0, width: int = 32, layers: int = 2) -> Path:
    """Write a ``ZImagePipeline`` folder and return it; images are multiples of 8 pixels."""
    torch.manual_seed(seed)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=width,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=width // 16,
        n_kv_heads=width // 16,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 64, 64],
    )
    torch.nn.init.normal_(transformer.x_pad_token)  # zeros in a new model, which would hide what they do
    torch.nn.init.normal_(transformer.cap_pad_token)
    vae = build_vae(use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159)
    tokenizer = qwen_tokenizer("<think>", "</think>")
    tokenizer.chat_template = _TEMPLATE
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=Qwen3Model(_text_config(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(directory)
    return Path(directory)


def _text_config(tokenizer: Qwen2Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
