"""A reward of your own: how colorful an image is, from 0 to 1. In PaCo-GRPO, beside the judge:

PYTHONPATH=../examples bash scripts/single_node/train_flux.sh t2is \\
    --config.train.reward_fn.own_reward:colorfulness=0.5

or instead of the configuration's rewards, also in evaluations:

PYTHONPATH=../examples bash scripts/single_node/train_flux.sh t2is --config.test.reward_fn= \\
    --config.train.reward_fn='{"own_reward:colorfulness": 1.0}'
"""

import numpy as np


def colorfulness(strength=1.0):
    """Arguments come from ``config.train.reward_fn_kwargs.own_reward:colorfulness.strength``."""

    def score(images, items):
        """One number for each image; NaN means no score. ``items`` hold prompts and metadata."""
        scores = []
        for image in images:
            saturation = np.asarray(image.convert("HSV"))[:, :, 1]
            scores.append(strength * saturation.mean() / 255)
        return np.array(scores)

    return score
