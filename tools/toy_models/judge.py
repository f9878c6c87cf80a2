"""The toy judge's base: a small Qwen2.5-VL that describes one or two panels and has never seen the judge's question.

It learns captions and yes/no questions about single panels, then to name what two panels have in common, as any
vision-language model can. On the judge's question it is at chance: turning that knowledge into Yes or No is left to
PaCo-Reward. (A base that knew captions only was still at chance after 800 steps of LoRA.)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from paco_judge.questions import theme_question
from paco_toy.reward_data import verdict
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTERS,
    COLOURS,
    SHAPES,
    STYLES,
    VIEWS,
    Character,
    departed,
    theme,
    with_article,
)
from toy_models.panels import PanelCache
from toy_models.qwen_vl import SPECIAL_TOKENS, new_image_processors, new_model, new_tokenizer
from toy_models.training import fit

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
CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"
COMPARISON = "What do the two images have in common?"


def _caption_one(character: Character) -> str:
    return f"A {character}."


def _caption_two(first: Character, second: Character) -> str:
    return f"First {with_article(first)}, second {with_article(second)}."


def _in_common(first: Character, second: Character) -> str:
    shared = [name for name in ATTRIBUTES if getattr(first, name) == getattr(second, name)]
    if len(shared) == 3:
        return "Everything."
    return f"Only {' and '.join(shared)}." if shared else "Nothing."


def _presence_question(thing: str) -> str:
    return f"Does the image show something {thing}? Answer Yes or No."


def new_processor() -> Qwen2_5_VLProcessor:
    """A vocabulary of 512 entries, trained on everything that will be read or written, and 56 x 56 px images."""
    texts = [CAPTION_ONE, CAPTION_TWO] * 50 + ["system\nYou are a helpful assistant.", "user\n", "assistant\n"] * 50
    for i, character in enumerate(CHARACTERS):
        other = CHARACTERS[(i * 37 + 11) % len(CHARACTERS)]
        texts += [theme_question(theme(character)), verdict(character, character), verdict(character, other)]
        texts += [_caption_one(character), _caption_two(character, other)]
    texts += [_presence_question(thing) for thing in (*STYLES, *COLOURS, *SHAPES)]
    tokenizer = new_tokenizer(texts, 512 - len(SPECIAL_TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    images, videos = new_image_processors()
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def new_judge(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of 1.2 M parameters."""
    text = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    return new_model(processor.tokenizer, seed, text, {"depth": 3, "hidden_size": 96, "intermediate_size": 192})


def load_judge(folder: Path) -> tuple[Qwen2_5_VLProcessor, Qwen2_5_VLForConditionalGeneration]:
    """A judge's base from its folder, float32."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return Qwen2_5_VLProcessor.from_pretrained(folder), model


class CaptionBatches:
    """Batches of single captions, double captions and yes/no questions on single panels.

    Attributes:
        comparisons: Also ask what two panels have in common; the second half of the training does.
    """

    def __init__(self, processor: Qwen2_5_VLProcessor, caches: dict[int, PanelCache], seed: int):
        self.processor, self.caches = processor, caches
        self.rng = np.random.default_rng([seed, 3])
        self.comparisons = False

    def _question(self) -> tuple[list[int], str, str]:
        """Characters shown, question, answer."""
        first, second = (int(i) for i in self.rng.integers(len(CHARACTERS), size=2))
        kind, character = self.rng.random(), CHARACTERS[first]
        if self.comparisons and self.rng.random() < 0.5:
            second = (first, departed(first, self.rng), second)[self.rng.integers(3)]
            return [first, second], COMPARISON, _in_common(character, CHARACTERS[second])
        if kind < 0.3:
            return [first], CAPTION_ONE, _caption_one(character)
        if kind < 0.8:
            second = first if self.rng.random() < 0.25 else second
            return [first, second], CAPTION_TWO, _caption_two(character, CHARACTERS[second])
        attribute = list(ATTRIBUTES)[self.rng.integers(3)]
        shown = getattr(character, attribute)
        others = [value for value in ATTRIBUTES[attribute] if value != shown]
        asked = shown if self.rng.random() < 0.5 else str(self.rng.choice(others))
        return [first], _presence_question(asked), "Yes." if asked == shown else "No."

    def panel(self, character: int) -> torch.Tensor:
        """A panel of a character in any view and size, with noise of up to 0.08: uint8 (3, S, S)."""
        cache = self.caches[int(self.rng.choice(list(self.caches)))]
        pixels = cache.draw(np.array(character), self.rng.integers(len(VIEWS)), self.rng)
        noise = self.rng.normal(scale=255 * self.rng.uniform(0, 0.08), size=pixels.shape)
        return torch.from_numpy(np.clip(pixels + noise, 0, 255)).permute(2, 0, 1).to(torch.uint8)

    def batch(self, size: int = 32) -> dict[str, torch.Tensor]:
        """Right-padded inputs; labels are -100 except on the answers and their ends."""
        heads, answers, images = [], [], []
        for _ in range(size):
            shown, question, answer = self._question()
            heads.append(chat_prompt(self.processor, question, len(shown)))
            answers.append(answer + "<|im_end|>")
            images += [self.panel(c) for c in shown]
        texts = [head + answer for head, answer in zip(heads, answers)]
        inputs = self.processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
        lengths = torch.tensor([len(ids) for ids in self.processor.tokenizer(answers).input_ids])
        ends = inputs["attention_mask"].sum(dim=1)
        place = torch.arange(inputs["input_ids"].shape[1])
        is_answer = (place < ends[:, None]) & (place >= (ends - lengths)[:, None])
        return {**inputs, "labels": inputs["input_ids"].masked_fill(~is_answer, -100)}


def chat_prompt(processor: Qwen2_5_VLProcessor, question: str, images: int) -> str:
    """The text before an answer to a question about images."""
    content = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    return processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def train_judge(model, batches: CaptionBatches, seconds: float) -> None:
    """Trains for a wall-clock time, with a new learning rate schedule."""

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        loss = model(**batches.batch()).loss
        return loss, {"loss": loss}

    fit([(model, 1.5e-3)], next_loss, "judge", seconds=seconds, warm_up=100, decay=0.6)


@torch.no_grad()
def caption_accuracy(model, batches: CaptionBatches, count: int = 420) -> float:
    """Share of single panels whose caption, decoded greedily, is correct word for word."""
    processor, right = batches.processor, 0
    head = chat_prompt(processor, CAPTION_ONE, 1)
    for start in range(0, count, 105):
        characters = [c % len(CHARACTERS) for c in range(start, start + 105)]
        images = [batches.panel(c) for c in characters]
        inputs = processor(text=[head] * len(images), images=images, padding=True, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers = processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        right += sum(a.strip() == _caption_one(CHARACTERS[c]) for a, c in zip(answers, characters))
    return right / count
