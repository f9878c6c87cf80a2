"""Rewards that compare the images of a group: whole groups on however many processes, gaps,
failures.
"""

import multiprocessing
import os

import numpy as np
from accelerate import Accelerator
from fakes import free_port
from PIL import Image

from paco_grpo.rewards.queue import ScoreQueue, ScoringError
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item

REWARD = "reward_factories:unlike_others"
TOTAL = 22
rng = np.random.default_rng(0)
ITEMS = [
    Item(int(i), f"item {i}", references=(lambda: None,))
    for i in rng.permutation(np.arange(TOTAL) % 5)
]  # not picklable
GRAYS = rng.integers(256, size=TOTAL)
LEFT_OUT = 7


def scores_on(rank, processes, port, answers):
    """A process's share of the epoch: (scores, sizes of the calls, error of a failing reward) go to
    ``answers``.
    """
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    accelerator, calls = Accelerator(cpu=True), []

    def scores(**kwargs):
        compare = build_rewards({REWARD: 1.0}, {REWARD: kwargs})["unlike_others"]
        gray = lambda images, items: np.array([image.getpixel((0, 0))[0] for image in images])
        queue = ScoreQueue({"gray": gray, "c": compare}, 3)
        mine = range(rank, TOTAL, processes)
        for start in range(0, len(mine), 4):
            part = mine[start : start + 4]
            images = [
                None if p == LEFT_OUT else Image.new("RGB", (4, 4), (int(GRAYS[p]),) * 3)
                for p in part
            ]
            queue.submit(images, [ITEMS[p] for p in part], [p // processes for p in part])
        return queue.gathered(accelerator, TOTAL, lambda: False)

    found = scores(calls=calls)
    try:
        scores(unscored="item 3")
    except ScoringError as error:
        answers.put((found, calls, str(error)))


def test_whole_groups_on_one_and_two_processes():
    """Distance of each image from the mean of the others of its item; the streaming reward as
    before.
    """
    ids, wanted = np.array([item.item_id for item in ITEMS]), np.full((TOTAL, 2), np.nan)
    for p in set(range(TOTAL)) - {LEFT_OUT}:
        others = [GRAYS[q] for q in range(TOTAL) if ids[q] == ids[p] and q not in (p, LEFT_OUT)]
        wanted[p] = GRAYS[p], abs(GRAYS[p] - np.mean(others))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_runs"])
    for processes in (1, 2):
        answers, port = context.Queue(), free_port()
        started = [
            context.Process(target=scores_on, args=(r, processes, port, answers))
            for r in range(processes)
        ]
        for process in started:
            process.start()
        found = [answers.get(timeout=240) for _ in started]
        for process in started:
            process.join(60)
        for scores, calls, _ in found:
            np.testing.assert_allclose(scores, wanted)
            assert calls  # all work
        assert sorted(size for _, calls, _ in found for size in calls) == sorted(
            np.bincount(np.delete(ids, LEFT_OUT))
        )
        errors = [error for *_, error in found]  # one process fails, and all report it
        assert all("c: ValueError: item 3" in error for error in errors)
        assert sum("another process" in error for error in errors) == processes - 1
