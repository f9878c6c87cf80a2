"""imagereward: learned human preference for an image given its prompt (arXiv 2304.05977).

Its package pins timm 0.6.13 and an older transformers, so it runs in a separate environment
(``bash scripts/reward_service.sh imagereward``):
``reward_fn_kwargs={"imagereward": {"server": "http://127.0.0.1:8101"}}``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward


def imagereward(
    model: str = "ImageReward-v1.0", cache_dir: str | None = None, device: Any = "cpu"
) -> Reward:
    """The package's score of the whole image with the whole prompt.

    It is about standard normal over real images.

    Args:
        model: Name or file of the weights, which are loaded at the first image.
        cache_dir: Where the package downloads to; None = ``~/.cache/ImageReward``.
    """
    import ImageReward
    import torch

    @cache
    def load() -> torch.nn.Module:
        return ImageReward.load(model, device=str(device), download_root=cache_dir).eval()

    @torch.no_grad()
    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        scorer = load()
        pairs = zip(images, items, strict=True)
        scores = [scorer.score(item.prompt, image.convert("RGB")) for image, item in pairs]
        return np.array(scores, dtype=np.float64)

    return score
