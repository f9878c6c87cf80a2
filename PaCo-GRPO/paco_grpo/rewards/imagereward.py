"""imagereward: learned human preference for an image given its prompt (ImageReward, arXiv 2304.05977).

Its package pins timm 0.6.13 and an older transformers, so it runs in a separate environment
(``bash scripts/reward_service.sh imagereward``): ``reward_fn_kwargs={"imagereward": {"server": "http://127.0.0.1:8101"}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

_TOKENS = 35  # what the model was trained with


class ImageRewardScore:
    """(reward − mean) / std of the whole image with the whole prompt.

    ``load`` returns the package's model; it is called at the first image.
    """

    def __init__(self, load: Callable[[], Any], batch_size: int) -> None:
        self._load, self.batch_size = load, batch_size
        self._model = None

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, about standard normal over real images."""
        if self._model is None:
            self._model = self._load()
        prompts, size = [item.prompt for item in items], self.batch_size
        starts = range(0, len(images), size)
        return np.concatenate([self._score(images[i : i + size], prompts[i : i + size]) for i in starts])

    def _score(self, images: Sequence[Image.Image], prompts: list[str]) -> np.ndarray:
        # The package's own functions take one image at a time; these are their steps on a batch. The text encoder
        # attends to the image, so its features cannot be kept for other images.
        import torch

        model = self._model
        with torch.no_grad():
            text = model.blip.tokenizer(
                prompts, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
            ).to(model.device)
            pixels = torch.stack([model.preprocess(image.convert("RGB")) for image in images]).to(model.device)
            shown = model.blip.visual_encoder(pixels)
            output = model.blip.text_encoder(
                text.input_ids,
                attention_mask=text.attention_mask,
                encoder_hidden_states=shown,
                encoder_attention_mask=torch.ones(shown.shape[:-1], dtype=torch.long, device=shown.device),
                return_dict=True,
            )
            rewards = model.mlp(output.last_hidden_state[:, 0, :].float())[:, 0]
        return ((rewards - model.mean) / model.std).double().cpu().numpy()


def imagereward(
    model: str = "ImageReward-v1.0", cache_dir: str | None = None, device: Any = "cpu", batch_size: int = 8
) -> ImageRewardScore:
    """ImageReward in this process; ``server=…`` runs it in another one (see ``registry``).

    Args:
        model: Name or file of the weights.
        cache_dir: Where the package downloads to; None = ``~/.cache/ImageReward``.
        device: Where it computes.
        batch_size: Images per forward.

    Raises:
        ImportError: image-reward is not installed here.
    """
    import ImageReward

    def load() -> Any:
        return ImageReward.load(model, device=str(device), download_root=cache_dir).eval()

    return ImageRewardScore(load, batch_size)
