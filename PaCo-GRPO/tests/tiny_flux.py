"""A FLUX pipeline folder with tiny random weights, built in place: the real classes, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

_SPECIAL = ["<pad>", "</s>", "<unk>", "<s>"]
_CHARACTERS = [chr(code) for code in range(32, 127)]


def build_tiny_flux(
    directory: str | Path,
    *,
    seed: int = 0,
    width: int = 32,
    double_blocks: int = 2,
    single_blocks: int = 2,
    text_width: int = 32,
    vae_channels: tuple[int, ...] = (4, 8, 8),
    latent_channels: int = 4,
    guidance_embeds: bool = True,
    pipeline_class: type[FluxPipeline | FluxKontextPipeline] = FluxPipeline,
) -> Path:
    """Write a ``FluxPipeline`` (or ``FluxKontextPipeline``) folder and return it.

    Images are multiples of ``2 ** len(vae_channels)`` pixels (8 by default). ``width`` is a multiple of 16.
    """
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=4 * latent_channels,
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=16,
        num_attention_heads=width // 16,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    vae = build_vae(
        channels=vae_channels, latent_channels=latent_channels, use_quant_conv=False, use_post_quant_conv=False,
        scaling_factor=0.8, shift_factor=0.1,
    )  # fmt: skip
    pipeline = pipeline_class(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
        ),
        vae=vae,
        text_encoder=CLIPTextModel(clip_config(text_width)),
        tokenizer=tokenizer("<s> $A </s>", model_max_length=48),
        text_encoder_2=T5EncoderModel(t5_config(text_width)),
        tokenizer_2=tokenizer("$A </s>", model_max_length=512),
        transformer=transformer,
    )
    pipeline.save_pretrained(directory)
    return Path(directory)


def build_vae(
    model_class: type[ModelMixin] = AutoencoderKL,
    *,
    channels: tuple[int, ...] = (4, 8, 8),
    latent_channels: int = 4,
    **config,
) -> ModelMixin:
    """A VAE whose latents have ``2 ** (len(channels) - 1)`` times smaller sides."""
    return model_class(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
        **config,
    )


def tokenizer(template: str, model_max_length: int) -> PreTrainedTokenizerFast:
    """One token a character, so that any two prompts differ."""
    vocabulary = {token: i for i, token in enumerate(_SPECIAL + _CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=model_max_length,
    )


def clip_config(width: int, layers: int = 1) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(_SPECIAL + _CHARACTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=48,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
    )


def t5_config(width: int) -> T5Config:
    return T5Config(
        vocab_size=len(_SPECIAL + _CHARACTERS),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
