"""Learned preferences of people: imagereward (arXiv 2304.05977), hpsv3 (2508.03789) and edit_reward
(2509.26346).

Their packages need older versions of transformers, so they run in separate environments
(``bash scripts/reward_service.sh hpsv3``). The last two are called with names: the order of their
arguments differs between releases and from what their callers expect.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from paco_grpo.item import Item
from paco_grpo.rewards.contract import ScoreFn, with_attributes
from paco_grpo.rewards.judge import check_one_reference

Batch = dict[str, list[Any]]  # a package's arguments by name

_QUESTIONS = [["Is there a circle in the image?", "Yes"], ["Is the circle red?", "Yes"]]
_SIDE = 448


def check_order(score: ScoreFn) -> None:
    """Raises ValueError: ``score`` does not prefer a drawing of its prompt to noise.

    Nothing else reveals weights that were not loaded, or arguments in another order. The item has a
    reference image, for rewards of edits, and the questions of GenEval 2.
    """
    before, after = (_circle(color) for color in ("black", "red"))
    pixels = np.random.default_rng(0).integers(256, size=(_SIDE, _SIDE, 3), dtype=np.uint8)
    noise = Image.fromarray(pixels)
    prompt = "Make it a red circle on a white background."
    item = Item(0, prompt, metadata={"vqa_list": _QUESTIONS}, references=(before,))
    better, worse = np.asarray(score([after, noise], [item, item]), dtype=np.float64)
    if not better > worse:  # also of NaN
        raise ValueError(
            f"a red circle gets {better:.3g} and noise {worse:.3g} for {prompt!r}: "
            "the weights or the version of its package are wrong"
        )


def _circle(color: str) -> Image.Image:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    ImageDraw.Draw(image).ellipse((112, 112, 336, 336), fill=color)
    return image


def imagereward(
    model: str = "ImageReward-v1.0", cache_dir: str | None = None, device: Any = "cpu"
) -> ScoreFn:
    """The package's score of the whole image with the whole prompt.

    It is about standard normal over real images.

    Args:
        model: Name or file of the weights, which are loaded at the first image.
        cache_dir: Where the package downloads to; None = ``~/.cache/ImageReward``.
    """
    import ImageReward  # pyright: ignore[reportMissingImports]
    import torch

    @cache
    def load() -> Any:
        return ImageReward.load(model, device=str(device), download_root=cache_dir).eval()

    @torch.no_grad()
    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        scorer = load()
        pairs = zip(images, items, strict=True)
        scores = [scorer.score(item.prompt, image.convert("RGB")) for image, item in pairs]
        return np.array(scores, dtype=np.float64)

    return with_attributes(score, where=("cache_dir",))


def hpsv3(
    checkpoint: str | None = None,
    config: str | None = None,
    batch_size: int = 8,
    device: Any = "cpu",
) -> ScoreFn:
    """The mean μ that HPSv3 predicts for the image with its prompt, without bounds.

    Args:
        checkpoint: File of the weights; None = the package downloads MizzenAI/HPSv3.
        config: The model's YAML; None = the package's, of Qwen2-VL-7B.
    """
    from hpsv3 import HPSv3RewardInferencer  # pyright: ignore[reportMissingImports]

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
) -> ScoreFn:
    """The score of EditReward for an edit of one image by its instruction, without bounds.

    Args:
        checkpoint: Folder of the weights.
        config: The model's YAML, from ``EditReward/config`` in its repository.
        reward_dim: ``overall_detail``, ``overall``, ``dim1`` (followed) or ``dim2`` (quality).
    """
    from EditReward import EditRewardInferencer  # pyright: ignore[reportMissingImports]

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


with_attributes(edit_reward, check_item=lambda item: check_one_reference(item, "edit_reward"))


def _reward(
    load: Callable[[], Any],
    arguments: Callable[[Sequence[Image.Image], Sequence[Item]], Batch],
    batch_size: int,
) -> ScoreFn:
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

    return with_attributes(score, check=partial(check_order, score))
