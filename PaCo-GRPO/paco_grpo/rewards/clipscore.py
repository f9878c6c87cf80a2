"""clipscore: CLIP similarity of the whole image with the whole prompt, over 30 as in Flow-GRPO's released code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paco_grpo.rewards.clip_text_image import ClipTextImage

if TYPE_CHECKING:
    import torch

MODEL = "openai/clip-vit-large-patch14"
_SCALE = 30.0  # so that rewards are of order 1


def clipscore(
    model: str = MODEL, processor: str | None = None, device: torch.device | str = "cpu", batch_size: int = 8
) -> ClipTextImage:
    """logit_scale · cos(image, prompt) / 30.

    Args:
        model: Hub name or folder of the CLIP model.
        processor: Hub name or folder of its processor; None = the model's.
        device: Where it computes.
        batch_size: Images per forward.
    """
    return ClipTextImage(model, processor or model, _SCALE, device, batch_size)
