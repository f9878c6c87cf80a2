"""The toy judge's base: a small Qwen2.5-VL that says what one or two panels show, and was never asked the judge's question.

It learns captions and yes/no questions about single panels, then to name what two panels have in common, as any
vision-language model can. On the judge's question it is at chance: turning that knowledge into Yes or No is left to
PaCo-Reward. (A base that knew captions only was still at chance after 800 steps of LoRA.)
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from paco_judge.questions import theme_question
from paco_toy import wording
from paco_toy.bases.panels import PanelCache
from paco_toy.world import CHARACTERS, COLOURS, SHAPES, STYLES, VIEWS, departed, theme

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
IMAGE_PIXELS = 56 * 56  # every panel becomes 4 x 4 patches of 14 px, merged to 4 tokens
_BATCH = 32

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _texts() -> list[str]:
    """Everything that will be read or written, so that the small vocabulary spends its merges well."""
    texts = [wording.CAPTION_ONE, wording.CAPTION_TWO] * 50 + [
        "system\nYou are a helpful assistant.",
        "user\n",
        "assistant\n",
    ] * 50
    for i, character in enumerate(CHARACTERS):
        other = CHARACTERS[(i * 37 + 11) % len(CHARACTERS)]
        texts += [
            theme_question(theme(character)),
            wording.verdict(character, character),
            wording.verdict(character, other),
        ]
        texts += [wording.caption_one(character), wording.caption_two(character, other)]
    return texts + [wording.presence_question(thing) for thing in (*STYLES, *COLOURS, *SHAPES)]


def new_processor() -> Qwen2_5_VLProcessor:
    """Byte-level BPE of 512 entries with Qwen's special tokens, and the Qwen2-VL image processor fixed to 56 x 56 px."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])._tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        _texts(), trainers.BpeTrainer(vocab_size=512 - len(SPECIAL_TOKENS), initial_alphabet=alphabet)
    )
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS), model_max_length=2048,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"shortest_edge": IMAGE_PIXELS, "longest_edge": IMAGE_PIXELS}
    images = Qwen2VLImageProcessor(
        size=size, min_pixels=IMAGE_PIXELS, max_pixels=IMAGE_PIXELS, patch_size=14, merge_size=2
    )
    videos = Qwen2VLVideoProcessor(
        size=size, min_pixels=IMAGE_PIXELS, max_pixels=IMAGE_PIXELS, patch_size=14, merge_size=2
    )
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def new_judge(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of 1.2 M parameters. Its initialiser is wide (0.06): with Qwen's 0.02 it does not start to learn."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"), "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 3, "hidden_size": 96, "intermediate_size": 192, "num_heads": 3, "out_hidden_size": 128, "patch_size": 14,
            "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [2], "initializer_range": 0.06,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def load_judge(folder: Path) -> tuple[Qwen2_5_VLProcessor, Qwen2_5_VLForConditionalGeneration]:
    """A judge's base from its folder, float32, to be trained on."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return Qwen2_5_VLProcessor.from_pretrained(folder), model


def roughen(pixels: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Light noise (up to 0.08) on a panel, as a generator's panel would have: uint8 (S, S, 3) to float (3, S, S) in [0, 255]."""
    noise = rng.normal(scale=255 * rng.uniform(0, 0.08), size=pixels.shape)
    return torch.from_numpy(np.clip(pixels + noise, 0, 255)).permute(2, 0, 1).to(torch.uint8)


class CaptionBatches:
    """Batches of single captions, double captions and yes/no questions on single panels, ready for the model."""

    def __init__(self, processor: Qwen2_5_VLProcessor, caches: dict[int, PanelCache], seed: int):
        self.processor, self.caches = processor, caches
        self.rng = np.random.default_rng([seed, 3])
        self.comparisons = False  # the second leg of training sets it

    def _question(self) -> tuple[list[int], str, str]:
        """Characters shown, question, answer."""
        first, second = (int(i) for i in self.rng.integers(len(CHARACTERS), size=2))
        kind, character = self.rng.random(), CHARACTERS[first]
        if self.comparisons and self.rng.random() < 0.5:
            second = (first, departed(first, self.rng), second)[self.rng.integers(3)]
            shared = wording.shared_attributes(character, CHARACTERS[second])
            return [first, second], wording.COMPARISON, shared
        if kind < 0.3:
            return [first], wording.CAPTION_ONE, wording.caption_one(character)
        if kind < 0.8:
            second = first if self.rng.random() < 0.25 else second
            return [first, second], wording.CAPTION_TWO, wording.caption_two(character, CHARACTERS[second])
        attribute, values = (("style", STYLES), ("colour", tuple(COLOURS)), ("shape", SHAPES))[self.rng.integers(3)]
        shown = getattr(character, attribute)
        asked = shown if self.rng.random() < 0.5 else str(self.rng.choice([v for v in values if v != shown]))
        return [first], wording.presence_question(asked), "Yes." if asked == shown else "No."

    def panel(self, character: int) -> torch.Tensor:
        """A roughened panel of a character in any view and size."""
        cache = self.caches[int(self.rng.choice(list(self.caches)))]
        return roughen(cache.draw(np.array(character), self.rng.integers(len(VIEWS)), self.rng), self.rng)

    def batch(self, size: int = _BATCH) -> dict[str, torch.Tensor]:
        """Inputs with labels; only the answers (and their end) are learnt."""
        prompts, answers, images = [], [], []
        for _ in range(size):
            shown, question, answer = self._question()
            content = [{"type": "image"}] * len(shown) + [{"type": "text", "text": question}]
            prompts.append([{"role": "user", "content": content}])
            answers.append(answer)
            images += [self.panel(c) for c in shown]
        return collate(self.processor, prompts, answers, images)


def collate(processor, prompts: list, answers: list[str], images: list) -> dict[str, torch.Tensor]:
    """Right-padded inputs for prompt + answer, labels -100 everywhere but on the answer."""
    heads = [processor.tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    inputs = processor(
        text=[h + a + "<|im_end|>" for h, a in zip(heads, answers)],
        images=images,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    tails = [len(ids) for ids in processor.tokenizer([a + "<|im_end|>" for a in answers]).input_ids]
    ends = inputs["attention_mask"].sum(dim=1)
    place = torch.arange(inputs["input_ids"].shape[1])
    is_answer = (place < ends[:, None]) & (place >= (ends - torch.tensor(tails))[:, None])
    return {**inputs, "labels": inputs["input_ids"].masked_fill(~is_answer, -100)}


def train_judge(model, batches: CaptionBatches, seconds: float, lr: float = 1.5e-3) -> None:
    """AdamW with warm-up and linear decay for a fixed wall-clock time."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, step, log_at, recent = time.monotonic(), 0, 0.0, None
    while (elapsed := time.monotonic() - started) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - elapsed / seconds) / 0.6))
        loss = model(**batches.batch()).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        recent = loss.item() if recent is None else 0.95 * recent + 0.05 * loss.item()
        if elapsed > log_at:
            logger.info("judge %4.0f/%.0f s step %d loss %.4f", elapsed, seconds, step, recent)
            log_at += 20
    model.eval()


@torch.no_grad()
def caption_accuracy(model, processor, batches: CaptionBatches, count: int = 420) -> float:
    """Share of single panels whose caption, decoded greedily, is right word for word."""
    right = 0
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": wording.CAPTION_ONE}]}]
    head = processor.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    for start in range(0, count, 105):
        images = [batches.panel(c % len(CHARACTERS)) for c in range(start, start + 105)]
        inputs = processor(text=[head] * len(images), images=images, padding=True, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers = processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        wanted = [wording.caption_one(CHARACTERS[c % len(CHARACTERS)]) for c in range(start, start + 105)]
        right += sum(a.strip() == w for a, w in zip(answers, wanted))
    return right / count
