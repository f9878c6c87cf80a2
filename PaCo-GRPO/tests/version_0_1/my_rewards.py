"""A reward as users wrote it for version 0.1."""

import numpy as np


def blueness(scale=1.0):
    def score(images, items):
        return [scale * np.asarray(image, dtype=float)[..., 2].mean() / 255 for image in images]

    return score
