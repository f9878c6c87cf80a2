"""A reward that varies much more than the others, for the study of aggregations."""

import numpy as np

from paco_grpo.rewards.registry import Reward

_BLACK = 64  # of 255


def darkness() -> Reward:
    """Percent of pixels that are nearly black, (n,) float64; std/mean is about 2 at first."""

    def percent(images, items):
        shares = [np.mean(np.asarray(image.convert("L")) < _BLACK) for image in images]
        return 100 * np.array(shares)

    return percent
