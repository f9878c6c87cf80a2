"""The toy judge's base: a small Qwen2.5-VL that has never seen the judge's question.

It learns captions and yes/no questions about single panels, then to name what two panels have in
common. On the judge's question it is at chance: that is left to PaCo-Reward. (A base that knew
captions only was still at chance after 800 steps of LoRA.)
"""

import json
from collections.abc import Iterable

import numpy as np
import torch
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
from paco_toy import world
from paco_toy.build_world import verdict
from toy_models.data import draw
from toy_models.training import Losses, fit, for_seconds

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"
COMPARISON = "What do the two images have in common?"
PRESENCE = "Does the image show something {}? Answer Yes or No."
_PIXELS = 56 * 56  # every image becomes 4 x 4 patches of 14 px, merged to 4 tokens


def _caption_two(first: world.Character, second: world.Character) -> str:
    return f"First {world.with_article(first)}, second {world.with_article(second)}."


def _in_common(first: world.Character, second: world.Character) -> str:
    shared = [name for name in world.ATTRIBUTES if getattr(first, name) == getattr(second, name)]
    if len(shared) == len(world.ATTRIBUTES):
        return "Everything."
    if not shared:
        return "Nothing."
    return f"Only {' and '.join(shared)}."


def new_processor(texts: Iterable[str], vocabulary: int) -> Qwen2_5_VLProcessor:
    """Byte-level BPE of ``vocabulary`` entries besides Qwen's special tokens; 56 x 56 px images."""
    bpe = Tokenizer(models.BPE())
    qwen = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])
    bpe.pre_tokenizer = qwen._tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    options = {
        "size": {"shortest_edge": _PIXELS, "longest_edge": _PIXELS},
        "min_pixels": _PIXELS,
        "max_pixels": _PIXELS,
        "patch_size": 14,
        "merge_size": 2,
    }
    images = Qwen2VLImageProcessor(**options)
    videos = Qwen2VLVideoProcessor(**options)
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def world_processor() -> Qwen2_5_VLProcessor:
    """512 entries, trained on everything that the judge will read or write."""
    chat = ["system\nYou are a helpful assistant.", "user\n", "assistant\n"]
    texts = 50 * [CAPTION_ONE, CAPTION_TWO] + 50 * chat  # they are common
    for i, character in enumerate(world.CHARACTERS):
        other = world.CHARACTERS[(i * 37 + 11) % len(world.CHARACTERS)]
        texts += [
            theme_question(world.theme(character)),
            verdict(character, character),
            verdict(character, other),
            f"A {character}.",
            _caption_two(character, other),
        ]
    texts += [PRESENCE.format(value) for value in (*world.STYLES, *world.COLOURS, *world.SHAPES)]
    return new_processor(texts, 512 - len(SPECIAL_TOKENS))


def new_judge(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of 1.1 M parameters.

    With Qwen's initializer_range of 0.02 it does not start to learn.
    """
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    names = ("image_pad", "video_pad", "vision_start", "vision_end", "endoftext")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "initializer_range": 0.06,
        "bos_token_id": ids["endoftext"],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": ids["endoftext"],
    }
    vision_config = {
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
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _question(rng: np.random.Generator, comparisons: bool) -> tuple[list[int], str, str]:
    """Characters, question, answer."""
    first, second = rng.integers(len(world.CHARACTERS), size=2).tolist()
    kind = rng.random()
    character = world.CHARACTERS[first]
    if comparisons and rng.random() < 0.5:
        # The same character, a similar one, or any.
        second = (first, world.departed(first, rng), second)[rng.integers(3)]
        return [first, second], COMPARISON, _in_common(character, world.CHARACTERS[second])
    if kind < 0.3:
        return [first], CAPTION_ONE, f"A {character}."
    if kind < 0.8:
        if rng.random() < 0.25:
            second = first
        return [first, second], CAPTION_TWO, _caption_two(character, world.CHARACTERS[second])
    attribute = list(world.ATTRIBUTES)[rng.integers(len(world.ATTRIBUTES))]
    is_shown = rng.random() < 0.5
    other = character if is_shown else world.changed(character, attribute, rng)
    question = PRESENCE.format(getattr(other, attribute))
    return [first], question, "Yes." if is_shown else "No."


def _panel(character: int, rng: np.random.Generator) -> torch.Tensor:
    """In any view and size, with noise of up to 0.08: uint8 (3, S, S)."""
    side = int(rng.choice([16, 32, 64]))  # of grids of 32, 64 and 128 px
    view = rng.integers(len(world.VIEWS))
    pixels = draw(side, np.array(character), view, rng)
    scale = rng.uniform(0, world.MAX_NOISE)
    noise = rng.normal(scale=255 * scale, size=pixels.shape)
    return torch.from_numpy(np.clip(pixels + noise, 0, 255)).permute(2, 0, 1).to(torch.uint8)


def _batch(
    processor: Qwen2_5_VLProcessor, rng: np.random.Generator, comparisons: bool
) -> dict[str, torch.Tensor]:
    """Right-padded inputs; labels are -100 except on the answers and their ends."""
    examples = [_question(rng, comparisons) for _ in range(32)]
    images = []
    texts = []
    answers = []
    for characters, question, answer in examples:
        images += [_panel(character, rng) for character in characters]
        content = [{"type": "image"}] * len(characters) + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        texts.append(text.removesuffix("\n"))
        answers.append(answer)
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    answer_ids = processor.tokenizer(answers).input_ids
    lengths = torch.tensor([len(ids) + 1 for ids in answer_ids])  # with <|im_end|>
    ends = inputs["attention_mask"].sum(dim=1)
    place = torch.arange(inputs["input_ids"].shape[1])
    is_answer = (place < ends[:, None]) & (place >= (ends - lengths)[:, None])
    return {**inputs, "labels": inputs["input_ids"].masked_fill(~is_answer, -100)}


def train(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    seconds: float,
    seed: int,
) -> None:
    """Captions and questions first, then also comparisons."""
    rng = np.random.default_rng([seed, 3])
    for comparisons, share in ((False, 0.45), (True, 0.55)):

        def next_losses(step: int, progress: float, comparisons: bool = comparisons) -> Losses:
            return {"loss": model(**_batch(processor, rng, comparisons)).loss}

        fit([(model, 1.5e-3)], next_losses, "judge", for_seconds(share * seconds), decay=0.6)
