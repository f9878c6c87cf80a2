"""Scoring in the background: order, batch sizes, failures, people."""

import threading
import time

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image
from reward_factories import checked

from paco_grpo.distributed import Stopped
from paco_grpo.item import Item
from paco_grpo.monitoring import progress
from paco_grpo.rewards import queue as queues
from paco_grpo.rewards.queue import ScoreQueue, ScoringError

ITEM = Item(0, "a prompt")


def make_queue(*batch_size, **functions):
    rewards = {name: checked(function) for name, function in functions.items()}
    return ScoreQueue(rewards, *batch_size)


def gray(level):
    return Image.new("RGB", (4, 4), (level,) * 3)


def levels(images, items):
    return np.array([image.getpixel((0, 0))[0] for image in images], dtype=float)


def submit(queue, values, start=0):
    rows = range(start, start + len(values))
    queue.submit([gray(v) for v in values], [ITEM] * len(values), rows, [100 + row for row in rows])


@pytest.mark.parametrize(("arguments", "expected"), [([2], [2, 2, 1]), ([], [5])])
def test_images_are_collected_across_sampling_batches(arguments, expected):
    sizes = []

    def score(images, items):
        sizes.append(len(images))
        return levels(images, items)

    queue = make_queue(*arguments, r=score)
    for row in range(5):
        submit(queue, [10 * row], start=row)
    assert queue.results(5)[:, 0].tolist() == [0, 10, 20, 30, 40] and sizes == expected


def test_a_reward_that_allows_it_has_several_images_in_flight():
    together = threading.Barrier(3)

    def judge(images, items):
        together.wait(5)
        return levels(images, items)

    judge.parallel_calls = 3
    queue = make_queue(judge=judge)
    for row in range(3):
        submit(queue, [row], start=row)
    assert queue.results(3)[:, 0].tolist() == [0, 1, 2]


def test_a_reward_that_paints_on_its_images_changes_no_other():
    def painter(images, items):
        images[0].paste((200, 200, 200), (0, 0, 4, 4))
        return levels(images, items)

    queue = make_queue(
        painter=painter, gray=lambda *images_and_items: time.sleep(0.2) or levels(*images_and_items)
    )
    own = gray(10)
    queue.submit([own], [ITEM], [0], [1])
    assert queue.results(1).tolist() == [[200, 10]] and own.getpixel((0, 0)) == (10, 10, 10)


def test_waiting_can_be_interrupted():
    queue = make_queue(slow=lambda images, items: time.sleep(0.3) or np.zeros(1))
    submit(queue, [1])
    with pytest.raises(Stopped):
        queue.results(1, should_stop=lambda: True)


def test_a_long_wait_says_how_far_it_is(monkeypatch, caplog):
    """Of two rewards, one answers at once, the other one never."""
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    answer = threading.Event()
    polls = iter([False, False, True])
    queue = make_queue(
        quick=levels, slow=lambda images, items: answer.wait() and levels(images, items)
    )
    submit(queue, [10, 20, 30])
    with pytest.raises(Stopped):
        queue.results(3, should_stop=lambda: next(polls))
    answer.set()
    assert caplog.messages[-1].startswith("scoring: 3 of 6 scores")


def test_people_are_waited_for_once_all_is_shown_and_not_when_that_fails(monkeypatch):
    monkeypatch.setattr(queues, "_POLL_SECONDS", 0.02)
    shown = []
    asked = []  # how many items had been shown

    def score(images, items):
        return levels(images, items)

    def show(images, items):
        time.sleep(0.1)
        shown.append(items[0].prompt)
        if shown[-1] == "lost":
            raise OSError("the page is gone")

    def is_waiting():
        asked.append(len(shown))
        return "lost" in shown or len(asked) < 3

    def scores(prompt):
        queue = make_queue(votes=score)
        items = [ITEM, Item(5, prompt), ITEM]
        queue.submit([gray(v) for v in (10, 20, 30)], items, range(3), [7, 8, 9])
        polls = iter(40 * [False])
        return queue.gathered(Accelerator(cpu=True), 3, lambda: next(polls))[:, 0].tolist()

    score.compares_images = True
    score.show = show
    score.is_waiting = is_waiting
    assert scores("a fox") == [10, 20, 30] and asked == [2, 2, 2]
    with pytest.raises(ScoringError, match="votes: OSError: the page is gone"):
        scores("lost")
