"""FLUX.2 pipeline folders, Klein and dev, with tiny random weights: the real classes, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tiny_flux import build_vae
from tiny_qwen_edit import qwen_tokenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_TEMPLATE = (  # short, and it shows its two switches
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
_TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 1024, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip


def build_tiny_flux2(directory: str | Path, *, klein: bool = True, is_distilled: bool = False, seed: int = 0) -> Path:
    """Write a ``Flux2KleinPipeline`` or ``Flux2Pipeline`` folder and return it; images are multiples of 8 pixels.

    The VAE's batch-norm statistics are random, else wrong normalization would go unseen.
    """
    torch.manual_seed(seed)
    vae = build_vae(AutoencoderKLFlux2)
    vae.bn.running_mean.normal_(std=0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * _TEXT["hidden_size"],
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=not klein,
    )
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": vae,
        "transformer": transformer,
    }
    if klein:
        tokenizer = qwen_tokenizer("<think>", "</think>")
        tokenizer.chat_template = _TEMPLATE
        encoder = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=28, tie_word_embeddings=True, **_TEXT)
        )
        pipeline = Flux2KleinPipeline(text_encoder=encoder, tokenizer=tokenizer, is_distilled=is_distilled, **parts)
    else:
        processor = _pixtral_processor()
        pipeline = Flux2Pipeline(text_encoder=_mistral(processor.tokenizer), tokenizer=processor, **parts)
    pipeline.save_pretrained(directory)
    return Path(directory)


def _pixtral_processor() -> PixtralProcessor:
    """One token a character, and one for the pipeline's fixed system message."""
    special = [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[IMG]",
        "[IMG_BREAK]",
        "[IMG_END]",
        SYSTEM_MESSAGE,
    ]
    vocabulary = {token: i for i, token in enumerate([*special, *map(chr, range(32, 127))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[4:],
    )
    template = (
        "<s>{% for message in messages %}{% set text = message.content[0].text %}"
        "{% if message.role == 'user' %}[INST]{{ text }}[/INST]{% else %}{{ text }}{% endif %}{% endfor %}"
    )
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=template)


def _mistral(tokenizer: PreTrainedTokenizerFast) -> Mistral3ForConditionalGeneration:
    text = _TEXT | {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 31}
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "head_dim": 16, "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, image_token_index=image)
    )
