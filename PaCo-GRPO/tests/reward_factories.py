"""Reward factories that tests name by import path."""

import time

import numpy as np


def factory(scale: float = 1.0, device="nowhere"):
    """A user's reward."""

    def score(images, items):
        return np.full(len(images), scale)

    score.device = device
    return score


def broken_shape():
    return lambda images, items: np.zeros((len(images), 2))


def infinite():
    return lambda images, items: np.full(len(images), np.inf)


def not_callable():
    return 3


def sleeping(seconds: float = 0.1):
    """brightness of a judge that takes ``seconds`` for a call."""

    def score(images, items):
        time.sleep(seconds)
        return np.array([np.asarray(image, dtype=np.float64).mean() for image in images])

    return score


def checking(longest: int):
    """Takes short prompts alone."""
    return lambda images, items: np.zeros(len(images))


def _check_item(item, kwargs):
    if len(item.prompt) > kwargs["longest"]:
        raise ValueError(f"longer than {kwargs['longest']}")


checking.check_item = _check_item
