"""subfig_dreamsim: how similar the sub-figures look to people (DreamSim, arXiv 2306.09344).

Needs the package ``dreamsim`` (``pip install 'paco-grpo[dreamsim]'``), which downloads its own
weights.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import normalize

from paco_grpo.rewards.registry import Reward
from paco_grpo.rewards.subfigures import check_panels, mean_over_pairs


def subfig_dreamsim(
    dreamsim_type: str = "ensemble",
    cache_dir: str = "~/.cache/dreamsim",
    device: torch.device | str = "cpu",
    batch_size: int = 16,
) -> Reward:
    """1 − DreamSim distance, averaged over pairs of sub-figures.

    ``dreamsim_type``: one of the package's names, such as ``ensemble``, ``dino_vitb16``,
    ``clip_vitb32`` or ``open_clip_vitb32``.
    """
    from dreamsim import dreamsim

    @cache
    def load() -> tuple[Any, Any]:
        folder = Path(cache_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return dreamsim(
            pretrained=True, device=str(device), cache_dir=str(folder), dreamsim_type=dreamsim_type
        )

    @torch.no_grad()
    def features(images: Sequence[Image.Image]) -> torch.Tensor:
        """(n, C) float32; 1 − cosine of two rows is the package's distance."""
        model, preprocess = load()
        pixels = torch.cat([preprocess(image.convert("RGB")) for image in images]).to(device)
        vectors = [model.embed(batch).flatten(1) for batch in pixels.split(batch_size)]
        return normalize(torch.cat(vectors), dim=-1)

    return mean_over_pairs("subfig_dreamsim", features)


subfig_dreamsim.check_item = lambda item, kwargs: check_panels(item, "subfig_dreamsim")
