"""The toy judge's base: a small Qwen2.5-VL that has never seen the judge's question.

It learns captions and yes/no questions about single panels, then to name what two panels have in
common. On the judge's question it is at chance: that is left to PaCo-Reward. (A base that knew
captions only was still at chance after 800 steps of LoRA.)
"""

import math

import numpy as np
import torch
from training import draw, fit
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from paco_toy import world

CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"
COMPARISON = "What do the two images have in common?"
PRESENCE = "Does the image show something {}? Answer Yes or No."
BATCH_SIZE = 32
# About what one core does in 20 minutes (measured: 0.45 and 0.52 s a step).
CAPTION_STEPS = 1_300
ALL_STEPS = 1_300


def _in_common(first: world.Character, second: world.Character) -> str:
    shared = [name for name in world.ATTRIBUTES if getattr(first, name) == getattr(second, name)]
    if first == second:
        return "Everything."
    return f"Only {' and '.join(shared)}." if shared else "Nothing."


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
        other = world.CHARACTERS[second]
        answer = f"First {world.with_article(character)}, second {world.with_article(other)}."
        return [first, second], CAPTION_TWO, answer
    attribute = list(world.ATTRIBUTES)[rng.integers(len(world.ATTRIBUTES))]
    is_shown = rng.random() < 0.5
    other = character if is_shown else world.changed(character, attribute, rng)
    answer = "Yes." if is_shown else "No."
    return [first], PRESENCE.format(getattr(other, attribute)), answer


def _panel(character: int, rng: np.random.Generator) -> torch.Tensor:
    """In any view and size, with noise of up to 0.08: uint8 (3, S, S)."""
    side = rng.choice([16, 32, 64])  # of grids of 32, 64 and 128 px
    view = rng.integers(len(world.VIEWS))
    pixels = draw(side, np.array(character), view, rng)
    scale = rng.uniform(0, world.MAX_NOISE)
    noise = rng.normal(scale=255 * scale, size=pixels.shape)
    return torch.from_numpy(np.clip(pixels + noise, 0, 255)).permute(2, 0, 1).to(torch.uint8)


def _batch(
    processor: Qwen2_5_VLProcessor, rng: np.random.Generator, comparisons: bool
) -> dict[str, torch.Tensor]:
    """Right-padded inputs; labels are -100 except on the answers and their ends."""
    images = []
    texts = []
    answers = []
    for characters, question, answer in [_question(rng, comparisons) for _ in range(BATCH_SIZE)]:
        images += [_panel(character, rng) for character in characters]
        content = [{"type": "image"}] * len(characters) + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        texts.append(text.removesuffix("\n"))
        answers.append(answer)
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    ends = inputs["attention_mask"].sum(dim=1)
    for row, ids in enumerate(processor.tokenizer(answers).input_ids):
        answer = slice(ends[row] - len(ids) - 1, ends[row])  # with <|im_end|>
        labels[row, answer] = inputs["input_ids"][row, answer]
    return {**inputs, "labels": labels}


def train(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    share: float,
) -> None:
    """Captions and questions first, then also comparisons, for a ``share`` of the steps."""
    rng = np.random.default_rng([0, 3])

    for comparisons, steps in ((False, CAPTION_STEPS), (True, ALL_STEPS)):

        def next_loss(step: int, comparisons: bool = comparisons) -> torch.Tensor:
            return model(**_batch(processor, rng, comparisons)).loss

        fit([(model, 1.5e-3)], next_loss, math.ceil(share * steps), decay=0.6)
