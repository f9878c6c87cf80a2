# ruff: noqa: N999  (the published name)
"""subfig_clipI: how alike CLIP finds the sub-figures of one grid (mean cosine over pairs, OpenCLIP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paco_grpo.rewards.open_clip_model import MODEL, WEIGHTS, open_clip_model
from paco_grpo.rewards.panels import has_panels
from paco_grpo.rewards.subfig_pairs import SubfigPairs

if TYPE_CHECKING:
    import torch


def subfig_clipI(
    model: str = MODEL, pretrained: str | None = WEIGHTS, device: torch.device | str = "cpu", batch_size: int = 32
) -> SubfigPairs:
    """CLIP-I between sub-figures; arguments and weights as in ``subfig_clipT`` (loaded once for both).

    Raises:
        ImportError: open_clip is not installed.
    """
    clip = open_clip_model(model, pretrained, device)
    return SubfigPairs("subfig_clipI", lambda images: clip.images(images, batch_size))


subfig_clipI.check_item = has_panels("subfig_clipI")
