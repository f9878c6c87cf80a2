"""A Qwen-Image or Qwen-Image-Edit pipeline folder with tiny random weights: the real classes, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_PATCH = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
# Qwen-Image's own scheduler, but for the number of tokens at which its shift ends.
SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192,
    "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip


def build_tiny_qwen_edit(
    directory: str | Path,
    *,
    seed: int = 0,
    width: int = 32,
    blocks: int = 2,
    pipeline_class: type[DiffusionPipeline] = QwenImageEditPipeline,
    zero_cond_t: bool = False,
) -> Path:
    """Write a folder of ``pipeline_class`` and return it; images are multiples of 8 pixels."""
    torch.manual_seed(seed)
    processor = _processor()
    z_dim = 4
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=z_dim,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.3, 0.2, 0.1, -0.1],
        latents_std=[0.9, 1.1, 1.3, 0.8],
    )
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * z_dim,
        out_channels=z_dim,
        num_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=width // 16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
    others = {} if pipeline_class is QwenImagePipeline else {"processor": processor}
    pipeline = pipeline_class(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=_text_encoder(processor.tokenizer),
        tokenizer=processor.tokenizer,
        **others,
        transformer=transformer,
    )
    pipeline.save_pretrained(directory)
    return Path(directory)


def qwen_tokenizer(*special: str) -> Qwen2Tokenizer:
    """One token a byte, and one for each text of ``special``."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *special)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate([*special, *alphabet])},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        model_max_length=4096,
    )


def _processor() -> Qwen2VLProcessor:
    size = {"size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}, "min_pixels": 8 * 8, "max_pixels": 64 * 64}
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**size, **_PATCH),
        qwen_tokenizer(*_VISION),
        Qwen2VLVideoProcessor(**size, **_PATCH),
        chat_template="",
    )


def _text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    starts = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 1, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [0], "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=starts["vision_start"],
        vision_end_token_id=starts["vision_end"],
        initializer_range=0.2,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
