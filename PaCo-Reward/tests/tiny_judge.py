"""A Qwen2.5-VL of 1.1 M random parameters with a small tokenizer, and a small pair data set."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from paco_judge.questions import theme_question
from toy_models.judge import CHAT_TEMPLATE, new_judge
from toy_models.qwen_vl import new_image_processors, new_tokenizer

THEMES = ["one red fox in four seasons", "a paper boat", "a tall lighthouse"]
REASONS = ["the colour is the same.", "both show it.", "the shape differs and the colour differs too."]


def make_processor() -> Qwen2_5_VLProcessor:
    """A few hundred tokens, among them Yes and No; 56 x 56 px images."""
    texts = [theme_question(theme) for theme in THEMES] * 20
    texts += [f"{word}. {reason}" for word in ("Yes", "No") for reason in REASONS] * 20
    texts += ["system\nYou are a helpful assistant.", "user\n", "assistant\n"] * 20
    tokenizer = new_tokenizer(texts, 420)
    tokenizer.chat_template = CHAT_TEMPLATE
    images, videos = new_image_processors()
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def make_model(processor: Qwen2_5_VLProcessor, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights, float32."""
    return new_judge(processor, seed).eval()


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
