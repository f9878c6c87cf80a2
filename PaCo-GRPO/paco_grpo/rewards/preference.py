"""hpsv3 (arXiv 2508.03789) and edit_reward (2509.26346): learned preferences of people.

Their packages need an older transformers, so they run in separate environments
(``bash scripts/reward_service.sh hpsv3``). Both are called with names: the order of their arguments
differs between releases and from what their callers expect.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.judge import check_one_reference
from paco_grpo.rewards.known_order import check_order
from paco_grpo.rewards.registry import Reward

Batch = dict[str, list]  # a package's arguments by name


def hpsv3(
    checkpoint: str | None = None,
    config: str | None = None,
    batch_size: int = 8,
    device: Any = "cpu",
) -> Reward:
    """The mean μ that HPSv3 predicts for the image with its prompt, without bounds.

    Args:
        checkpoint: File of the weights; None = the package downloads MizzenAI/HPSv3.
        config: The model's YAML; None = the package's, of Qwen2-VL-7B.
    """
    from hpsv3 import HPSv3RewardInferencer

    @cache
    def load() -> Any:
        return HPSv3RewardInferencer(
            config_path=config, checkpoint_path=checkpoint, device=str(device)
        )

    def arguments(images: Sequence[Image.Image], items: Sequence[Item]) -> Batch:
        return {"image_paths": list(images), "prompts": [item.prompt for item in items]}

    return _reward(load, arguments, batch_size)


def edit_reward(
    checkpoint: str,
    config: str,
    reward_dim: str = "overall_detail",
    batch_size: int = 4,
    device: Any = "cpu",
) -> Reward:
    """The score of EditReward for an edit of one image by its instruction, without bounds.

    Args:
        checkpoint: Folder of the weights.
        config: The model's YAML, from ``EditReward/config`` in its repository.
        reward_dim: ``overall_detail``, ``overall``, ``dim1`` (followed) or ``dim2`` (quality).
    """
    from EditReward import EditRewardInferencer

    @cache
    def load() -> Any:
        return EditRewardInferencer(
            config_path=config,
            checkpoint_path=checkpoint,
            device=str(device),
            reward_dim=reward_dim,
            rm_head_type="ranknet_multi_head",
        )

    def arguments(images: Sequence[Image.Image], items: Sequence[Item]) -> Batch:
        sources = [item.image for item in items]
        prompts = [item.prompt for item in items]
        return {"prompts": prompts, "image_src": sources, "image_paths": list(images)}

    return _reward(load, arguments, batch_size)


edit_reward.check_item = lambda item, kwargs: check_one_reference(item, "edit_reward")


def _reward(
    load: Callable[[], Any],
    arguments: Callable[[Sequence[Image.Image], Sequence[Item]], Batch],
    batch_size: int,
) -> Reward:
    """The first column of what the loaded model's ``reward`` returns, ``batch_size`` at a time."""
    import torch

    @torch.no_grad()
    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        images = [image.convert("RGB") for image in images]
        scores = []
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            rows = load().reward(**arguments(images[part], items[part]))
            scores += [float(row[0]) for row in rows]
        return np.array(scores)

    score.check = partial(check_order, score)
    return score
