# ruff: noqa: N999  (the published name: users run this file)
"""subfig_clipT: does each sub-figure show its own panel text? (arXiv 2512.04784, §5)

Run this file to download its weights: ``python paco_grpo/rewards/subfig_clipT.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paco_grpo.rewards.open_clip_model import MODEL, WEIGHTS, OpenClip, open_clip_model
from paco_judge.grid import split_image, split_prompt

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from paco_grpo.types import Item


class SubfigClipT:
    """Mean cosine similarity of each sub-figure with its panel text."""

    def __init__(self, clip: OpenClip, batch_size: int) -> None:
        self.clip, self.batch_size = clip, batch_size

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [−1, 1]."""
        cells, texts, counts = [], [], []
        for image, item in zip(images, items, strict=True):
            grid = split_prompt(item.prompt)
            cells.extend(split_image(image, grid.rows, grid.cols))
            texts.extend(grid.panels)
            counts.append(len(grid.panels))
        shown, told = self.clip.images(cells, self.batch_size), self.clip.texts(texts, self.batch_size)
        similarity = (shown * told).sum(dim=-1).double().cpu().numpy()
        return np.array([part.mean() for part in np.split(similarity, np.cumsum(counts)[:-1])])


def subfig_clipT(
    model: str = MODEL, pretrained: str | None = WEIGHTS, device: torch.device | str = "cpu", batch_size: int = 32
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
    return SubfigClipT(open_clip_model(model, pretrained, device), batch_size)


if __name__ == "__main__":
    from paco_grpo.rewards.download import download

    download(f"{MODEL} {WEIGHTS}", lambda: open_clip_model(MODEL, WEIGHTS, "cpu").load())
