"""Scoring in the background: order, batch sizes, failures, and how much of its time is hidden."""

import threading
import time

import numpy as np
import pytest
from reward_factories import sleeping
from tiny_policies import picture

from paco_grpo.distributed.processes import Stopped
from paco_grpo.rewards.queue import ScoringError, ScoringQueue


def test_submitting_does_not_wait_and_scores_keep_their_rows():
    gate = threading.Event()

    def slow(images, items):
        gate.wait(5)
        return np.array(images, dtype=float)

    queue = ScoringQueue(
        {"slow": slow, "double": lambda images, items: 2 * np.array(images, dtype=float)}, batch_size=2
    )
    queue.submit([10, 11, 12], [None] * 3, [2, 0, 1])
    queue.submit([13], [None], [3])
    gate.set()
    assert queue.results(5)[:4].tolist() == [[11, 22], [12, 24], [10, 20], [13, 26]]
    assert np.isnan(queue.results(1)).all()
    queue.close()


def test_batch_size():
    sizes = []
    queue = ScoringQueue({"r": lambda images, items: sizes.append(len(images)) or np.zeros(len(images))}, batch_size=2)
    queue.submit([1, 2, 3, 4, 5], [None] * 5, range(5))
    queue.results(5)
    assert sizes == [2, 2, 1]


def test_failed_reward_is_named():
    def failing(images, items):
        raise ConnectionError("gone")

    queue = ScoringQueue({"judge": failing})
    queue.submit([1], [None], [0])
    with pytest.raises(ScoringError, match="judge: ConnectionError: gone") as caught:
        queue.results(1)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert queue.failed()


def test_waiting_can_be_interrupted():
    queue = ScoringQueue({"slow": lambda images, items: time.sleep(0.3) or np.zeros(1)})
    queue.submit([1], [None], [0])
    with pytest.raises(Stopped):
        queue.results(1, should_stop=lambda: True)


@pytest.mark.parametrize(("sleep", "hidden"), [(0.6, True), (0.0, False)])
def test_hidden_share_of_reward_time(sleep, hidden):
    queue = ScoringQueue({"slow": sleeping(0.2), "quick": sleeping(0.0)})
    for row in range(2):
        queue.submit([picture(row)], [None], [row])
    time.sleep(sleep)
    queue.results(2)
    queue.close()
    assert queue.hidden_share > 0.6 if hidden else queue.hidden_share < 0.4
    assert np.isnan(ScoringQueue({}).hidden_share)
