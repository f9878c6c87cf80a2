"""Reward factories that tests name by import path."""

import itertools
import os
from pathlib import Path

import numpy as np

from paco_grpo.rewards.registry import CheckedReward


def grays(images):
    """The mean gray of each image."""
    return np.array([np.asarray(image.convert("L")).mean() for image in images])


def factory(scale: float = 1.0, device="nowhere"):
    def score(images, items):
        return np.full(len(images), scale)

    score.device = device
    return score


def asked():
    """The number of the item that an image is scored for."""
    return lambda images, items: np.array([float(item.item_id) for item in items])


def said(value: float):
    return lambda images, items: np.full(len(images), value)


def oracle_consistency():
    return lambda images, items: np.array([3.0 * item.item_id for item in items])


def oracle_between_images():
    return lambda images, items: np.array([item.item_id / 2 for item in items])


def of_set(begins: str, factor: float):
    """``factor`` · (gray + length of the prompt); fails for a prompt that begins otherwise."""

    def score(images, items):
        assert all(item.prompt.startswith(begins) for item in items)
        return factor * (grays(images) + [len(item.prompt) for item in items])

    return score


def spread_of_set(begins: str):
    """1 + distance from the mean gray of the prompt's images, which come together."""

    def score(images, items):
        assert all(item.prompt.startswith(begins) for item in items)
        assert len(images) == 3 and len({item.item_id for item in items}) == 1
        gray = grays(images)
        return 1 + abs(gray - gray.mean())

    score.compares_images = True
    return score


def wrong(result):
    return result


def checked(function):
    """The reward that a run makes of a function of images and items."""
    return CheckedReward("reward_factories:wrong", {"result": function}, "cpu")


def gaps(**anything):
    """Mean gray; missing for items with an odd number; fails on request."""

    def score(images, items):
        if any(item.prompt == "fail" for item in items):
            raise ValueError("cannot score 'fail'")
        means = grays(images)
        means[[item.item_id % 2 == 1 for item in items]] = np.nan
        return means

    return score


def drawn():
    return lambda images, items: np.random.random(len(images))


def failing(after: int = 1000):
    """Scores ``after`` images, then fails."""
    seen = []

    def score(images, items):
        seen.extend(images)
        if len(seen) > after:
            raise RuntimeError(f"the reward broke at {len(images)} images")
        return np.arange(1.0, len(images) + 1)

    return score


def no_scores():
    return lambda images, items: np.full(len(images), np.nan)


def told(file, fails_in=-1):
    """Writes what it is told to a file of its process; fails in an epoch."""
    path = Path(f"{file}_{os.environ.get('RANK', '0')}")

    def write(*words):
        with path.open("a") as lines:
            print(*words, file=lines)

    def score(images, items, *, epoch, seeds):
        for item, seed in zip(items, seeds, strict=True):
            write(epoch, item.item_id, seed)
        if epoch == fails_in:
            raise RuntimeError("the reward broke")
        return grays(images)

    def begin(run):
        write(run.folder, run.process, run.processes, "from", run.from_main(run.process))

    score.begin = begin
    score.follow = lambda *words: write("now", *words)
    score.close = lambda: write("closed")
    return score


def seeds_of(factor):
    """``factor`` · seed + epoch; keeps what it is told of its run."""

    def score(images, items, seeds, epoch):
        return factor * np.array(seeds) + epoch

    def close():
        score.calls.append("closed")
        raise RuntimeError("it is broken")

    score.calls = []
    score.begin = score.calls.append
    score.close = close
    return score


def negative():
    return lambda images, items: -np.arange(1.0, len(images) + 1)


def unlike_others(unscored=""):
    """Distance of an image's brightness from the mean of the others of its item."""

    def score(images, items):
        if unscored in [item.prompt for item in items]:
            raise ValueError(unscored)
        gray = grays(images)
        ids = [i.item_id for i in items]
        same = np.equal.outer(ids, ids) & ~np.eye(len(ids), dtype=bool)
        others = (same @ gray) / np.maximum(same.sum(axis=1), 1)
        return np.where(same.any(axis=1), abs(gray - others), 0)

    score.compares_images = True
    return score


def absent_while(file):
    """brightness; no score while ``file`` exists."""
    from tiny_run import brightness  # it needs torch, which the environment of a service lacks

    score = brightness()

    def score_unless(images, items):
        scores = score(images, items)
        if Path(file).exists():
            scores[:] = np.nan
        return scores

    return score_unless


def scripted(values=(0.5, 0.25)):
    """The next of ``values`` for all images of a call, again from the first after the last."""
    turn = itertools.cycle(values)
    return lambda images, items: np.full(len(images), next(turn))


def keyed(api_key, of=()):
    """Asks a server that needs a key, and records more than it should."""
    score = factory(2.0)
    score.record = {"arguments": {"api_key": api_key}}
    return score


def needs_scene():
    return no_scores()


needs_scene.check_item = lambda item, kwargs: item.metadata["scene"]
