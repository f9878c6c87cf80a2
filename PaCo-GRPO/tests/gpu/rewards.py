"""Local rewards on a fake GPU: each scores two images with a model of tiny weights."""

from pathlib import Path

import torch
from fake_gpu import fake_gpu
from PIL import Image
from tiny_pipelines import save_clip, save_open_clip

from paco_grpo.rewards.registry import CheckedReward
from paco_grpo.types import Item

PROMPT = "1x2 grid of a cat. [LEFT]: asleep. [RIGHT]: awake."


def main(place: str) -> dict[str, int]:
    """The number of scores of each reward; the models are written to ``place``."""
    folder = Path(place)
    model, weights = save_open_clip(folder / "open_clip")
    clip = save_clip(folder / "clip")
    panels = {"model": model, "pretrained": weights}
    rewards = {
        "subfig_clipT": panels,
        "subfig_clipI": panels,
        "pickscore": {"model": clip, "processor": clip},
        "clipscore": {"model": clip},
    }
    images = [Image.new("RGB", (256, 128), color) for color in ("black", "navy")]
    items = [Item(number, PROMPT) for number in range(2)]
    scores = {}
    with fake_gpu(80) as gpu:
        for name, arguments in rewards.items():
            reward = CheckedReward(name, arguments, torch.device("cuda:0"))
            scores[name] = len(reward(images, items))
            assert gpu.live, f"{name} is not on the GPU"
    return scores
