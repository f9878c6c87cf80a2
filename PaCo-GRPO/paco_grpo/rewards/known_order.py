"""A pair of drawn images whose order any reward must know, for a check when it starts."""

import numpy as np
from PIL import Image, ImageDraw

from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward

_QUESTIONS = [["Is there a circle in the image?", "Yes"], ["Is the circle red?", "Yes"]]
_SIDE = 448


def check_order(score: Reward) -> None:
    """Raises ValueError: ``score`` does not prefer a drawing of its prompt to noise.

    Weights that were not loaded, and arguments in another order, have no other sign. The item has a
    reference image, for rewards of edits, and the questions of GenEval 2.
    """
    before, after = (_circle(color) for color in ("black", "red"))
    pixels = np.random.default_rng(0).integers(256, size=(_SIDE, _SIDE, 3), dtype=np.uint8)
    noise = Image.fromarray(pixels)
    prompt = "Make it a red circle on a white background."
    item = Item(0, prompt, metadata={"vqa_list": _QUESTIONS}, references=(before,))
    better, worse = score([after, noise], [item, item])
    if not better > worse:  # also of NaN
        raise ValueError(
            f"a red circle gets {better:.3g} and noise {worse:.3g} for {prompt!r}: "
            "the weights or the version of its package are wrong"
        )


def _circle(color: str) -> Image.Image:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    ImageDraw.Draw(image).ellipse((112, 112, 336, 336), fill=color)
    return image
