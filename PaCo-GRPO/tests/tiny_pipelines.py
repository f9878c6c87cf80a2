"""Pipelines of every family with tiny random weights, and CLIPs: the real classes; images are
multiples of 8 pixels.
"""

import json
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

QWEN_TOKENIZER: Path | None = None  # a folder: families whose tokenizer is Qwen's get the real one
CHARACTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<pad>", "</s>", "<unk>", "<s>"]
# Qwen-Image's own scheduler, but for the number of tokens at which its shift ends.
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
QWEN3 = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 16,
}
KLEIN_CHAT = (  # short, and it shows its two switches
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
Z_IMAGE_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_21_CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}<|im_end|>\n{% endfor %}"
MISTRAL_CHAT = (
    "<s>{% for message in messages %}{% set text = message.content[0].text %}"
    "{% if message.role == 'user' %}[INST]{{ text }}[/INST]{% else %}{{ text }}{% endif %}"
    "{% endfor %}"
)


def build_vae(kind: type[diffusers.ModelMixin], **config) -> diffusers.ModelMixin:
    """A VAE whose latents have four times smaller sides."""
    return kind(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(4, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
        **{"latent_channels": 4} | config,
    )


def plain_vae(scaling_factor: float, shift_factor: float, **config) -> diffusers.ModelMixin:
    """Without the layers around the latents, as in FLUX, Stable Diffusion 3 and Z-Image."""
    scale = {"scaling_factor": scaling_factor, "shift_factor": shift_factor} | config
    return build_vae(
        diffusers.AutoencoderKL, use_quant_conv=False, use_post_quant_conv=False, **scale
    )


def character_tokenizer(special: list[str], **options) -> transformers.PreTrainedTokenizerFast:
    """One token a character, so that any two prompts differ; ``template`` of ``options``: what is
    around a text.
    """
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    if template := options.pop("template", None):
        ends = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        words.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names, **options)


def clip_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return character_tokenizer(SPECIAL, template="<s> $A </s>", model_max_length=48)


def t5_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return character_tokenizer(SPECIAL, template="$A </s>", model_max_length=512)


def qwen_tokenizer(*special: str) -> transformers.Qwen2Tokenizer:
    """One token a byte, and one for each text of ``special``; or Qwen's own."""
    if QWEN_TOKENIZER is not None:
        return transformers.Qwen2Tokenizer.from_pretrained(QWEN_TOKENIZER, model_max_length=4096)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *special)
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return transformers.Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        model_max_length=4096,
    )


def clip_config(width: int, layers: int = 1) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=len(SPECIAL + CHARACTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=48,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
    )


def t5_config(width: int) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=len(SPECIAL + CHARACTERS),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def build_tiny_flux(
    *,
    guidance_embeds: bool = True,
    pipeline_class: type[DiffusionPipeline] = diffusers.FluxPipeline,
) -> DiffusionPipeline:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return pipeline_class(
        scheduler=scheduler,
        vae=plain_vae(0.8, 0.1),
        text_encoder=transformers.CLIPTextModel(clip_config(32)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=transformers.T5EncoderModel(t5_config(32)),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


def build_tiny_sd3(*, dual: bool = True) -> DiffusionPipeline:
    """``dual``: with a second attention in the first block, as 3.5 medium has in many."""
    torch.manual_seed(0)
    clips = []
    for width in (16, 24):
        config = clip_config(width, layers=2)
        config.projection_dim = width
        clips.append(transformers.CLIPTextModelWithProjection(config))
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=48,
        pooled_projection_dim=16 + 24,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        dual_attention_layers=(0,) if dual else (),
    )
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=plain_vae(1.5305, 0.0609),
        transformer=transformer,
        text_encoder=clips[0],
        tokenizer=clip_tokenizer(),
        text_encoder_2=clips[1],
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=transformers.T5EncoderModel(t5_config(48)),
        tokenizer_3=t5_tokenizer(),
    )


def build_tiny_z_image() -> DiffusionPipeline:
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 64, 64],
    )
    # They are zeros in a new model, which would hide what they do.
    torch.nn.init.normal_(transformer.x_pad_token)
    torch.nn.init.normal_(transformer.cap_pad_token)
    tokenizer = qwen_tokenizer("<think>", "</think>")
    tokenizer.chat_template = Z_IMAGE_CHAT
    text = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        **QWEN3,
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=plain_vae(0.3611, 0.1159),
        text_encoder=transformers.Qwen3Model(text),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def build_tiny_flux2(*, klein: bool = True, is_distilled: bool = False) -> DiffusionPipeline:
    torch.manual_seed(0)
    vae = build_vae(diffusers.AutoencoderKLFlux2)
    # With random statistics, else wrong normalization would go unseen.
    vae.bn.running_mean.normal_(std=0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * QWEN3["hidden_size"],
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=not klein,
    )
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": vae,
        "transformer": transformer,
    }
    text = QWEN3 | {"initializer_range": 0.15}
    if klein:
        tokenizer = qwen_tokenizer("<think>", "</think>")
        tokenizer.chat_template = KLEIN_CHAT
        config = transformers.Qwen3Config(
            vocab_size=len(tokenizer), num_hidden_layers=28, tie_word_embeddings=True, **text
        )
        encoder = transformers.Qwen3ForCausalLM(config)
        return diffusers.Flux2KleinPipeline(
            text_encoder=encoder, tokenizer=tokenizer, is_distilled=is_distilled, **parts
        )
    # The fixed system message is one token.
    special = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", SYSTEM_MESSAGE]
    vocabulary = ["<pad>", "<unk>", "<s>", "</s>", *special]
    tokenizer = character_tokenizer(vocabulary, additional_special_tokens=special)
    text |= {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 31}
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    config = transformers.Mistral3Config(
        text_config=text, vision_config=dict(PIXTRAL), image_token_index=image
    )
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(), tokenizer, chat_template=MISTRAL_CHAT
    )
    return diffusers.Flux2Pipeline(text_encoder=encoder, tokenizer=processor, **parts)


VISION_SIZES = {
    "size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
    "min_pixels": 8 * 8,
    "max_pixels": 64 * 64,
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def vision_tokenizer() -> transformers.Qwen2Tokenizer:
    # A token each: then 34 tokens come before a prompt, as many as QwenImagePipeline drops.
    words = " the image by detailing color shape size texture quantity text spatial"
    words += " relationships of objects and background"
    special = "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
    whole_words = [f" {word}" for word in words.split()]
    return qwen_tokenizer(*special.split(), "system", "Describe", "user", *whole_words)


def vision_ids(tokenizer: transformers.Qwen2Tokenizer) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in VISION_TOKENS.items()}


def qwen2_5_vl(layers: int = 1) -> tuple[transformers.Qwen2VLProcessor, torch.nn.Module]:
    """Its processor, with the tokenizer, and the model."""
    tokenizer = vision_tokenizer()
    images = transformers.Qwen2VLImageProcessor(**VISION_SIZES)
    videos = transformers.Qwen2VLVideoProcessor(**VISION_SIZES)
    processor = transformers.Qwen2VLProcessor(images, tokenizer, videos, chat_template="")
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 1,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.2,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, initializer_range=0.2, **vision_ids(tokenizer)
    )
    return processor, transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl_config(tokenizer: transformers.Qwen2Tokenizer) -> transformers.Qwen3VLConfig:
    text = QWEN3 | {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 1,
        "out_hidden_size": QWEN3["hidden_size"],
        "patch_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    return transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, **vision_ids(tokenizer)
    )


def build_tiny_krea2(*, is_distilled: bool = False) -> DiffusionPipeline:
    torch.manual_seed(0)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=32,
        text_hidden_dim=QWEN3["hidden_size"],
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=40,
        axes_dims_rope=(4, 6, 6),
    )
    tokenizer = vision_tokenizer()
    return diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=transformers.Qwen3VLModel(qwen3_vl_config(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
        text_encoder_select_layers=(1, 2, 3),
        is_distilled=is_distilled,
    )


def build_tiny_qwen_21(sample_sigmas: list[float] | None = None) -> DiffusionPipeline:
    torch.manual_seed(0)
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=QWEN3["hidden_size"],
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.3, -0.2, 0.1, -0.1],
        latents_std=[1.2, 0.9, 1.1, 0.7],
    )
    tokenizer = vision_tokenizer()
    # Also in the real encoder, a token of the prompt stands for 32x32 pixels, as in the VAE 2x2.
    sizes = VISION_SIZES | {
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        "min_pixels": 32 * 32,
        "max_pixels": 256 * 256,
        "patch_size": 16,
    }
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(patch_size=16),
        chat_template=QWEN_21_CHAT,
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=transformers.Qwen3VLForConditionalGeneration(qwen3_vl_config(tokenizer)),
        processor=processor,
        transformer=transformer,
        sample_sigmas=sample_sigmas,
    )


def qwen_vae() -> diffusers.AutoencoderKLQwenImage:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.3, 0.2, 0.1, -0.1],
        latents_std=[0.9, 1.1, 1.3, 0.8],
    )


def build_tiny_qwen(
    *,
    pipeline_class: type[DiffusionPipeline] = diffusers.QwenImageEditPipeline,
    zero_cond_t: bool = False,
) -> DiffusionPipeline:
    torch.manual_seed(0)
    vae = qwen_vae()
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
    processor, encoder = qwen2_5_vl()
    others = {} if pipeline_class is diffusers.QwenImagePipeline else {"processor": processor}
    others["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    return pipeline_class(
        vae=vae,
        text_encoder=encoder,
        tokenizer=processor.tokenizer,
        transformer=transformer,
        **others,
    )


def build_tiny_longcat(
    pipeline_class: type[DiffusionPipeline] = diffusers.LongCatImagePipeline,
) -> DiffusionPipeline:
    torch.manual_seed(0)
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    processor, encoder = qwen2_5_vl()
    return pipeline_class(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=plain_vae(0.7, 0.2, latent_channels=16),  # the pipelines draw 16 channels
        text_encoder=encoder,
        tokenizer=processor.tokenizer,
        text_processor=processor,
        transformer=transformer,
    )


def save_clip(folder: Path) -> str:
    """A transformers CLIP model and its processor; returns the folder, for ``pickscore`` and
    ``clipscore``.
    """
    torch.manual_seed(0)
    text = clip_config(16).to_dict() | {"max_position_embeddings": 77}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    transformers.CLIPProcessor(processor, clip_tokenizer()).save_pretrained(folder)
    return str(folder)


def save_open_clip(folder: Path) -> tuple[str, str]:
    """An OpenCLIP model, registered in this process; returns its name and its file of weights, for
    ``subfig_clipT``.

    Another process names it ``local-dir:FOLDER``.
    """
    import open_clip
    from safetensors.torch import save_file

    sizes = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 16,
            "heads": 2,
            "layers": 1,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny-test.json").write_text(json.dumps(sizes))
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": sizes, "preprocess_cfg": {}})
    )
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    weights = open_clip.create_model("tiny-test").state_dict()
    file = folder / "open_clip_model.safetensors"
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    return "tiny-test", str(file)
