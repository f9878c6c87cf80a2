"""imagereward: learned human preference for an image given its prompt (ImageReward, arXiv 2304.05977).

Its package pins timm 0.6.13 and an older transformers, so it runs in a separate environment
(``bash scripts/reward_service.sh imagereward``): ``reward_fn_kwargs={"imagereward": {"server": "http://127.0.0.1:8101"}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

_TOKENS = 35  # what the model was trained with


class ImageRewardScore:
    """(reward − mean) / std of the whole image with the whole prompt.

    ``load`` returns the package's model; it is called once, at the first image.
    """

    def __init__(self, load: Callable[[], Any], batch_size: int) -> None:
        self._load, self.batch_size = cache(load), batch_size

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, about standard normal over real images."""
        # The package's own functions take one image at a time; these are their steps on a batch. The text encoder
        # attends to the image, so its features cannot be kept for other images.
        import torch

        model, scores = self._load(), []
        for start in range(0, len(images), self.batch_size):
            part = slice(start, start + self.batch_size)
            with torch.no_grad():
                text = model.blip.tokenizer(
                    [item.prompt for item in items[part]],
                    padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt",
                ).to(model.device)  # fmt: skip
                pixels = torch.stack([model.preprocess(image.convert("RGB")) for image in images[part]])
                shown = model.blip.visual_encoder(pixels.to(model.device))
                output = model.blip.text_encoder(
                    text.input_ids,
                    attention_mask=text.attention_mask,
                    encoder_hidden_states=shown,
                    encoder_attention_mask=torch.ones(shown.shape[:-1], dtype=torch.long, device=shown.device),
                    return_dict=True,
                )
                rewards = model.mlp(output.last_hidden_state[:, 0, :].float())[:, 0]
            scores.append(((rewards - model.mean) / model.std).double().cpu().numpy())
        return np.concatenate(scores)


def imagereward(
    model: str = "ImageReward-v1.0", cache_dir: str | None = None, device: Any = "cpu", batch_size: int = 8
) -> ImageRewardScore:
    """ImageReward in this process; ``server=…`` runs it in another one (see ``registry``).

    Args:
        model: Name or file of the weights.
        cache_dir: Where the package downloads to; None = ``~/.cache/ImageReward``.
        device, batch_size: Where it computes, and how many images at once.

    Raises:
        ImportError: image-reward is not installed here.
    """
    import ImageReward

    def load() -> Any:
        return ImageReward.load(model, device=str(device), download_root=cache_dir).eval()

    return ImageRewardScore(load, batch_size)
