"""A reward of a user, to be run behind the service."""

import numpy as np


def gaps():
    """Mean gray; missing for the items with an odd number; fails on request."""

    def score(images, items):
        if any(item.prompt == "fail" for item in items):
            raise ValueError("cannot score 'fail'")
        means = np.array([np.asarray(image.convert("L")).mean() for image in images])
        means[[item.item_id % 2 == 1 for item in items]] = np.nan
        return means

    return score
