"""pickscore: human preference for an image given its prompt (Pick-a-Pic, arXiv 2305.01569), divided by 26.

Run this file to download its weights: ``python paco_grpo/rewards/pickscore_scores.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paco_grpo.rewards.clip_text_image import ClipTextImage

if TYPE_CHECKING:
    import torch

MODEL, PROCESSOR = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_SCALE = 26.0  # about the largest score in practice, so that rewards are of order 1


def pickscore(
    model: str = MODEL, processor: str = PROCESSOR, device: torch.device | str = "cpu", batch_size: int = 8
) -> ClipTextImage:
    """PickScore of the whole image with the whole prompt: logit_scale · cos / 26.

    Args:
        model: Hub name or folder of the CLIP model.
        processor: Hub name or folder of its processor.
        device: Where it computes.
        batch_size: Images per forward.
    """
    return ClipTextImage(model, processor, _SCALE, device, batch_size)


if __name__ == "__main__":
    from paco_grpo.rewards.download import download

    download(MODEL, pickscore().load)
