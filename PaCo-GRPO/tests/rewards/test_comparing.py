"""Rewards that compare the images of a group: whole groups on however many processes, gaps, failures."""

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
ITEMS = [Item(int(i), f"item {i}", image=lambda: None) for i in rng.permutation(np.arange(TOTAL) % 5)]  # not picklable
GRAYS = rng.integers(256, size=TOTAL)
LEFT_OUT = 7


def gray(level):
    return Image.new("RGB", (4, 4), (level,) * 3)


def scores_on(rank, processes, port, answers, unscored):
    """A process's share of the epoch; (rank, the scores or the error, sizes of the calls) goes to ``answers``."""
    if processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
    accelerator, calls = Accelerator(cpu=True), []
    compare = build_rewards({REWARD: 1.0}, {REWARD: {"calls": calls, "unscored": unscored}})["unlike_others"]
    queue = ScoreQueue({"gray": lambda images, items: np.array([i.getpixel((0, 0))[0] for i in images]), "c": compare}, 3)
    mine = list(range(rank, TOTAL, processes))
    for start in range(0, len(mine), 4):
        part = mine[start : start + 4]
        images = [None if p == LEFT_OUT else gray(int(GRAYS[p])) for p in part]
        queue.submit(images, [ITEMS[p] for p in part], [p // processes for p in part])
    try:
        answer = queue.gathered(accelerator, TOTAL, lambda: False)
    except ScoringError as error:
        answer = str(error)
    answers.put((rank, answer, calls))


def scores_with(processes, unscored=""):
    """The answers of all processes, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_runs"])
    answers, port = context.Queue(), free_port()
    started = [context.Process(target=scores_on, args=(rank, processes, port, answers, unscored)) for rank in range(processes)]
    for process in started:
        process.start()
    found = sorted((answers.get(timeout=240) for _ in started), key=lambda answer: answer[0])
    for process in started:
        process.join(60)
    return found


def test_whole_groups_on_one_and_two_processes():
    """Float64: distance of each image from the mean of the others of its item; the streaming reward as before."""
    ids, wanted = np.array([item.item_id for item in ITEMS]), np.full((TOTAL, 2), np.nan)
    for p in set(range(TOTAL)) - {LEFT_OUT}:
        others = [GRAYS[q] for q in range(TOTAL) if ids[q] == ids[p] and q not in (p, LEFT_OUT)]
        wanted[p] = GRAYS[p], abs(GRAYS[p] - np.mean(others))
    sizes = sorted(np.bincount(np.delete(ids, LEFT_OUT)))  # that one could not be decoded
    for processes in (1, 2):
        found = scores_with(processes)
        for _, scores, calls in found:
            np.testing.assert_allclose(scores, wanted)
            assert calls  # all work
        assert sorted(size for *_, calls in found for size in calls) == sizes, "each group once"


def test_failure_on_one_process_is_reported_by_all():
    first, second = scores_with(2, unscored="item 3")
    assert all("c: ValueError: item 3" in answer for answer in (first[1], second[1]))
    assert sum("another process" in answer for answer in (first[1], second[1])) == 1
