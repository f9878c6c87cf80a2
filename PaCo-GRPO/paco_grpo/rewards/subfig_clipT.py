# ruff: noqa: N999  (the published name: users run this file)
"""subfig_clipT: does each sub-figure show its own panel text? (arXiv 2512.04784, §5)

Run this file to download its weights: ``python paco_grpo/rewards/subfig_clipT.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paco_grpo.types import Item
from paco_judge.grid import split_image, split_prompt

if TYPE_CHECKING:
    from PIL import Image

MODEL, WEIGHTS = "ViT-H-14", "laion2b_s32b_b79k"


class SubfigClipT:
    """Mean cosine similarity of each sub-figure with its panel text; loads OpenCLIP at the first call."""

    def __init__(self, model: str, pretrained: str, device: torch.device | str, batch_size: int) -> None:
        self.name, self.pretrained, self.device, self.batch_size = model, pretrained, torch.device(device), batch_size
        self._model = None
        self._texts: dict[str, torch.Tensor] = {}

    def load(self) -> None:
        """Load the model (downloads it when it is not in the cache)."""
        if self._model is None:
            import open_clip

            model, _, self._preprocess = open_clip.create_model_and_transforms(
                self.name, pretrained=self.pretrained, device=self.device
            )
            self._model = model.eval()
            self._tokenize = open_clip.get_tokenizer(self.name)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [−1, 1]."""
        self.load()
        cells, texts, counts = [], [], []
        for image, item in zip(images, items, strict=True):
            grid = split_prompt(item.prompt)
            cells.extend(split_image(image, grid.rows, grid.cols))
            texts.extend(grid.panels)
            counts.append(len(grid.panels))
        similarity = (self._encode_images(cells) * self._encode_texts(texts)).sum(dim=-1).double().cpu().numpy()
        return np.array([part.mean() for part in np.split(similarity, np.cumsum(counts)[:-1])])

    def _encode_images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        features = []
        for start in range(0, len(images), self.batch_size):
            pixels = torch.stack(
                [self._preprocess(image.convert("RGB")) for image in images[start : start + self.batch_size]]
            )
            features.append(self._model.encode_image(pixels.to(self.device), normalize=True))
        return torch.cat(features)

    def _encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        new = [text for text in dict.fromkeys(texts) if text not in self._texts]
        for start in range(0, len(new), self.batch_size):
            batch = new[start : start + self.batch_size]
            features = self._model.encode_text(self._tokenize(batch).to(self.device), normalize=True)
            self._texts.update(zip(batch, features, strict=True))
        return torch.stack([self._texts[text] for text in texts])


def subfig_clipT(
    model: str = MODEL, pretrained: str = WEIGHTS, device: torch.device | str = "cpu", batch_size: int = 32
) -> SubfigClipT:
    """CLIP-T per sub-figure with OpenCLIP.

    Args:
        model: OpenCLIP architecture.
        pretrained: OpenCLIP tag, or a local file of weights.
        device: Where it computes.
        batch_size: Sub-figures (texts) per forward.

    Raises:
        ImportError: open_clip is not installed.
    """
    import open_clip  # noqa: F401  (missing package: said at once, not at the first image)

    return SubfigClipT(model, pretrained, device, batch_size)


if __name__ == "__main__":
    subfig_clipT().load()
    print(f"{MODEL} {WEIGHTS} is in the cache")
