"""A Qwen2.5-VL of 1.1 M random parameters with a small tokenizer, and a small pair data set."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from paco_judge.questions import theme_question

SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
# Qwen2.5-VL's template without videos and image numbers.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THEMES = ["one red fox in four seasons", "a paper boat", "a tall lighthouse"]
REASONS = ["the colour is the same.", "both show it.", "the shape differs and the colour differs too."]
IMAGE_PIXELS = 56 * 56


def make_processor() -> Qwen2_5_VLProcessor:
    """Byte-level BPE of a few hundred entries in which Yes and No are single tokens; 56 x 56 px images."""
    texts = [theme_question(theme) for theme in THEMES] * 20
    texts += [f"{word}. {reason}" for word in ("Yes", "No") for reason in REASONS] * 20
    texts += ["system\nYou are a helpful assistant.", "user\n", "assistant\n"] * 20
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])._tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = {"size": {"shortest_edge": IMAGE_PIXELS, "longest_edge": IMAGE_PIXELS}, "patch_size": 14, "merge_size": 2}
    sizes |= {"min_pixels": IMAGE_PIXELS, "max_pixels": IMAGE_PIXELS}
    images, videos = Qwen2VLImageProcessor(**sizes), Qwen2VLVideoProcessor(**sizes)
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def make_model(processor: Qwen2_5_VLProcessor, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights, float32; the toy world's size."""
    ids = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    starts = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": processor.tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": processor.tokenizer.eos_token_id,
        "pad_token_id": processor.tokenizer.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [2],
        "initializer_range": 0.06,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=starts["vision_start"],
        vision_end_token_id=starts["vision_end"],
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def save_judge(folder: Path, seed: int = 0) -> Path:
    """A complete model folder."""
    processor = make_processor()
    make_model(processor, seed).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int, size: int = 32) -> Image.Image:
    """A smooth random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)


def save_pairs(folder: Path, count: int = 8, name: str = "pairs", seed: int = 0) -> Path:
    """A ShareGPT data set of ``count`` pairs with answers of different lengths; returns the folder."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        files = [f"images/{name}_{index}_{side}.png" for side in "ab"]
        for side, file in enumerate(files):
            picture(seed + 2 * index + side * (index % 2)).save(folder / file)
        answer = "Yes. " + REASONS[index % 3] if index % 2 == 0 else "No. " + " ".join(REASONS[: index % 3 + 1])
        question = theme_question(THEMES[index % 3])
        turns = [{"role": "user", "content": "<image><image>" + question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": files})
    (folder / f"{name}.json").write_text(json.dumps(rows))
    info_file = folder / "dataset_info.json"
    info = json.loads(info_file.read_text()) if info_file.exists() else {}
    info[name] = {
        "file_name": f"{name}.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    }
    info_file.write_text(json.dumps(info))
    return folder
