"""subfig_dreamsim: how similar people would find the sub-figures of a grid (DreamSim, arXiv 2306.09344).

1 − DreamSim distance, averaged over pairs. Needs the package ``dreamsim`` (``pip install 'paco-grpo[dreamsim]'``),
which downloads its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from paco_grpo.rewards.subfigures import SubfigurePairs, check_panels

Load = Callable[[], tuple[nn.Module, Callable[[Image.Image], torch.Tensor]]]


class DreamSim:
    """Unit embeddings of images; ``load`` returns the package's model and preprocessing, called at the first image."""

    def __init__(self, load: Load, device: torch.device | str, batch_size: int) -> None:
        self._load, self.device, self.batch_size = cache(load), device, batch_size

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """(n, C) float32; 1 − cosine of two rows is DreamSim's distance."""
        (model, preprocess), features = self._load(), []
        for start in range(0, len(images), self.batch_size):
            batch = [preprocess(image.convert("RGB")) for image in images[start : start + self.batch_size]]
            features.append(model.embed(torch.cat(batch).to(self.device)).flatten(1))
        return nn.functional.normalize(torch.cat(features), dim=-1)


def subfig_dreamsim(
    dreamsim_type: str = "ensemble",
    cache_dir: str = "~/.cache/dreamsim",
    device: torch.device | str = "cpu",
    batch_size: int = 16,
) -> SubfigurePairs:
    """DreamSim between sub-figures.

    Args:
        dreamsim_type: ``ensemble``, ``dino_vitb16``, ``clip_vitb32``, ``open_clip_vitb32``, … (the package's names).
        cache_dir: Where its weights are, or are downloaded to.
        device, batch_size: Where it computes, and how many sub-figures at once.

    Raises:
        ImportError: dreamsim is not installed.
    """
    from dreamsim import dreamsim

    def load():
        folder = Path(cache_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return dreamsim(pretrained=True, device=str(device), cache_dir=str(folder), dreamsim_type=dreamsim_type)

    return SubfigurePairs("subfig_dreamsim", DreamSim(load, device, batch_size))


subfig_dreamsim.check_item = lambda item, kwargs: check_panels(item, "subfig_dreamsim")
