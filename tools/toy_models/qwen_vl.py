"""Small Qwen2.5-VL models: tokenizer, image processor and configuration, shared by the judge and the editor's text encoder."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_PIXELS = 56 * 56  # every image becomes 4 x 4 patches of 14 px, merged to 4 tokens


def new_tokenizer(texts: Iterable[str], vocabulary: int, min_frequency: int = 0) -> Qwen2Tokenizer:
    """Byte-level BPE trained on ``texts``, with at most ``vocabulary`` entries besides Qwen's special tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])._tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=min_frequency, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS), model_max_length=2048,
    )  # fmt: skip


def new_image_processors() -> tuple[Qwen2VLImageProcessor, Qwen2VLVideoProcessor]:
    """Processors fixed to 56 x 56 px."""
    options = {
        "size": {"shortest_edge": _PIXELS, "longest_edge": _PIXELS}, "min_pixels": _PIXELS, "max_pixels": _PIXELS,
        "patch_size": 14, "merge_size": 2,
    }  # fmt: skip
    return Qwen2VLImageProcessor(**options), Qwen2VLVideoProcessor(**options)


def new_model(tokenizer: Qwen2Tokenizer, seed: int, text: dict, vision: dict) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model. With Qwen's initializer of 0.02 one this small does not start to learn; here it is 0.06.

    Args:
        text: Sizes of the language model.
        vision: Sizes of the vision tower.
    """
    torch.manual_seed(seed)
    names = ("image_pad", "video_pad", "vision_start", "vision_end", "endoftext")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["endoftext"], "eos_token_id": tokenizer.eos_token_id, "pad_token_id": ids["endoftext"],
            **text,
        },
        vision_config={
            "num_heads": 3, "out_hidden_size": text["hidden_size"], "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "fullatt_block_indexes": [vision["depth"] - 1], "initializer_range": 0.06, **vision,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)
