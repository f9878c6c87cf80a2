"""A reward that varies much more than the others: the study of aggregations needs one."""

import numpy as np

from paco_grpo.rewards.registry import Reward

_BLACK = 64  # of 255


def darkness() -> Reward:
    """Percent of pixels that are nearly black, (n,) float64. In the toy world, std/mean is about 2."""
    return lambda images, items: np.array(
        [100 * np.mean(np.asarray(image.convert("L")) < _BLACK) for image in images]
    )
