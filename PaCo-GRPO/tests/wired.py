"""A batch of thirteen images of four items in which everything differs: prompt, quoted word, layout,
size, reference image, number of images, position; and a judge that answers each question otherwise.
A score that belongs to another image, item or pair is another number.
"""

import base64
import hashlib
import io
import json
import os
from collections.abc import Sequence
from functools import partial

import numpy as np
from accelerate import Accelerator
from fakes import distributed_environment, fake_judge
from PIL import Image

from paco_grpo.distributed import Shares
from paco_grpo.rewards.queue import ScoreQueue, ScoringError
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item

MODELS = (
    "PaCo-Reward-7B",
    "Qwen2.5-VL-7B-Instruct",
    "EditScore-7B",
    "UnifiedReward-2.0-qwen-7b",
    "Qwen3-VL-8B-Instruct",
)
# theme, layout, quoted word, height, width
ROWS = [
    ("a cat", (1, 2), "CHIMNEY", 24, 64),
    ("cat dog of a grid", (2, 1), "MOUNTAIN", 48, 32),
    ("a dog", (2, 2), "ORCHESTRA", 32, 40),
    ("dog cat", (1, 3), "TEMPERATURE", 16, 48),
]
ITEM_IDS = [3, 1, 3, 0, 2, 1, 2, 0, 2, 3, 0, 2, 1]  # of each image
NUM_CUT = [1, 1, 2, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]  # letters of the word that the image lacks
SEEDS = [1000 + 7 * position for position in range(len(ITEM_IDS))]
LEFT_OUT = 8  # the position of an image that the trainer does not deliver


def _item(number: int) -> Item:
    theme, (rows, cols), word, height, width = ROWS[number]
    panels = [f"PANEL-{i + 1}: picture {number + i} of {theme}." for i in range(rows * cols)]
    prompt = f'A {rows}x{cols} grid layout of {theme} with "{word}". {" ".join(panels)}'
    criteria = {"style": {"line": f"line {number}"}, "identity": {"a": theme, "b": word}}
    reference = Image.new("RGB", (40 + 8 * number, 32), (30 * number, 90, 200))
    questions = [["Is it a cat?", "Yes"], [f"Is it number {number}?", "No"]]
    metadata = {"open": True, "criteria": criteria, "idx": f"idx {number}", "vqa_list": questions}
    return Item(number, prompt, height, width, metadata, (reference,))


def _image(position: int) -> Image.Image:
    *_, height, width = ROWS[ITEM_IDS[position]]
    pixels = np.random.default_rng(position).integers(256, size=(height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


ITEMS = [_item(number) for number in ITEM_IDS]
IMAGES = [_image(position) for position in range(len(ITEM_IDS))]
OCR_SCORES = [
    1 - lacking / len(ROWS[number][2]) for number, lacking in zip(ITEM_IDS, NUM_CUT, strict=True)
]


def read_text(image: Image.Image) -> str:
    """What a reader of texts finds: the beginning of the image's word."""
    (position,) = [number for number, other in enumerate(IMAGES) if other == image]
    return ROWS[ITEM_IDS[position]][2][: -NUM_CUT[position]]


def share_of(*content) -> float:
    """A number from 0.1 to 0.9 that belongs to this content."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    return 0.1 + 0.8 * int.from_bytes(digest[:6], "big") / 2**48


def shown_to_judge(request: dict) -> tuple:
    """Pixels and texts of a request, in order."""
    parts = []
    for part in request["messages"][0]["content"]:
        if part["type"] == "text":
            parts.append(part["text"])
            continue
        png = base64.b64decode(part["image_url"]["url"].split(",")[1])
        parts.append(Image.open(io.BytesIO(png)).tobytes())
    return tuple(parts)


def respond(number: int, request: dict) -> tuple:
    """P(Yes), two scores for EditScore, whose passes differ by their seed, or UnifiedReward's."""
    if request["model"] == "UnifiedReward-2.0-qwen-7b":
        grade = 1 + 4 * share_of(shown_to_judge(request))
        return 200, fake_judge.written(f"Final Score: {grade:.12f}"), {}
    if request["model"] != "EditScore-7B":
        return 200, fake_judge.answer(share_of(shown_to_judge(request))), {}
    scores = edit_scores(shown_to_judge(request), request["seed"])
    return 200, fake_judge.written(json.dumps({"score": scores})), {}


def edit_scores(shown: tuple, seed: int) -> list[float]:
    return [25 * share_of(shown, seed, which) for which in ("first", "second")]


def submit_in_parts(queue: ScoreQueue, numbers: Sequence[int], positions: Sequence[int]) -> None:
    """Submit the images at ``positions`` as rows ``numbers``, three at a time."""
    for start in range(0, len(numbers), 3):
        part = positions[start : start + 3]
        images = [None if position == LEFT_OUT else IMAGES[position] for position in part]
        items = [ITEMS[position] for position in part]
        queue.submit(images, items, numbers[start : start + 3], [SEEDS[p] for p in part])


def drawn_from(compares=False):
    """The seed of each image; image, item and seed must belong together."""

    def score(images, items, seeds):
        positions = [SEEDS.index(seed) for seed in seeds]
        assert images == [IMAGES[position] for position in positions]
        assert [item.item_id for item in items] == [ITEM_IDS[position] for position in positions]
        return seeds

    score.compares_images = compares
    return score


compared_from = partial(drawn_from, True)


def gathered(accelerator: Accelerator, kwargs: dict) -> np.ndarray:
    """Scores of all images by the rewards that ``kwargs`` name, from one of several processes."""
    queue = ScoreQueue(build_rewards(dict.fromkeys(kwargs, 1.0), kwargs), 2)
    positions = Shares.of(accelerator, len(IMAGES)).positions
    submit_in_parts(queue, range(len(positions)), positions)
    return queue.gathered(accelerator, len(IMAGES), lambda: False)


def scores_on(rank: int, processes: int, port: int, kwargs: dict, answers) -> None:
    """Scores of all images, and the error of a reward that fails for one item."""
    os.environ |= distributed_environment(rank, processes, port)
    accelerator = Accelerator(cpu=True)
    scores = gathered(accelerator, kwargs)
    try:
        gathered(accelerator, {"reward_factories:unlike_others": {"unscored": ITEMS[0].prompt}})
    except ScoringError as error:
        answers.put((scores, str(error)))
