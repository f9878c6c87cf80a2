"""The toy judge's base: a small Qwen2.5-VL that has never seen the judge's question.

It learns captions and yes/no questions about single panels, then to name what two panels have in
common. On the judge's question it is at chance: that is left to PaCo-Reward. (A base that knew
captions only was still at chance after 800 steps of LoRA.)
"""

import numpy as np
import torch
from panels import draw
from training import Losses, fit, for_seconds
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from paco_toy import world

CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"
COMPARISON = "What do the two images have in common?"
PRESENCE = "Does the image show something {}? Answer Yes or No."


def _caption_two(first: world.Character, second: world.Character) -> str:
    return f"First {world.with_article(first)}, second {world.with_article(second)}."


def _in_common(first: world.Character, second: world.Character) -> str:
    shared = [name for name in world.ATTRIBUTES if getattr(first, name) == getattr(second, name)]
    if len(shared) == len(world.ATTRIBUTES):
        return "Everything."
    if not shared:
        return "Nothing."
    return f"Only {' and '.join(shared)}."


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
