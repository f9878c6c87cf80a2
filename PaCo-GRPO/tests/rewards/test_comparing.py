"""Rewards that compare the images of a group: whole groups on however many processes, gaps, failures, the journal."""

import multiprocessing
import socket

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from paco_grpo.rewards.queue import JournaledReward, ScoreJournal, ScoringError, ScoringQueue
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.rewards.remote.service import main
from paco_grpo.types import Item

REWARD = "reward_factories:unlike_others"
TOTAL = 22
rng = np.random.default_rng(0)
ITEMS = [Item(int(i), f"item {i}", image=lambda: None) for i in rng.permutation(np.arange(TOTAL) % 5)]  # not picklable
GRAYS = rng.integers(256, size=TOTAL)
LEFT_OUT = 7


def gray(level):
    return Image.new("RGB", (4, 4), (level,) * 3)


def scores_on(rank, processes, answers, environment, unscored=""):
    """A process's share of the epoch; (rank, the scores or the error, sizes of the calls) goes to ``answers``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        accelerator, calls = Accelerator(cpu=True), []
        compare = build_rewards({REWARD: 1.0}, {REWARD: {"calls": calls, "unscored": unscored}})["unlike_others"]
        queue = ScoringQueue({"gray": lambda images, items: np.array([i.getpixel((0, 0))[0] for i in images]), "c": compare}, 3)
        mine = list(range(rank, TOTAL, processes))
        for start in range(0, len(mine), 4):
            part = mine[start : start + 4]
            images = [None if p == LEFT_OUT else gray(int(GRAYS[p])) for p in part]
            queue.submit(images, [ITEMS[p] for p in part], [p // processes for p in part])
        try:
            answer = queue.gathered(accelerator, len(mine), TOTAL, lambda: False)
        except ScoringError as error:
            answer = str(error)
        answers.put((rank, answer, calls))


def scores_with(processes, **options):
    """The answers of all processes, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_runs"])
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": str(port),
                       "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        environment = environment if processes > 1 else {}
        started.append(context.Process(target=scores_on, args=(rank, processes, answers, environment), kwargs=options))
        started[-1].start()
    found = sorted((answers.get(timeout=240) for _ in started), key=lambda answer: answer[0])
    for process in started:
        process.join(60)
    return found


@pytest.fixture(scope="module")
def alone():
    return scores_with(1)[0]


def expected():
    """Float64: distance of each image from the mean of the others of its item."""
    scores = np.full(TOTAL, np.nan)
    ids = np.array([item.item_id for item in ITEMS])
    for p in set(range(TOTAL)) - {LEFT_OUT}:
        others = [GRAYS[q] for q in range(TOTAL) if ids[q] == ids[p] and q not in (p, LEFT_OUT)]
        scores[p] = abs(GRAYS[p] - np.mean(others))
    return scores


def test_one_call_with_whole_groups_and_the_streaming_reward_as_before(alone):
    _, scores, calls = alone
    np.testing.assert_allclose(scores[:, 1], expected())
    np.testing.assert_array_equal(scores[:, 0], np.where(np.arange(TOTAL) == LEFT_OUT, np.nan, GRAYS))
    assert calls == [TOTAL - 1]  # one call; the image that could not be decoded is in none


def test_two_processes_see_the_same_groups(alone):
    first, second = scores_with(2)
    np.testing.assert_array_equal(first[1], alone[1])
    np.testing.assert_array_equal(second[1], alone[1])
    assert len(first[2]) == len(second[2]) == 1 and sum(first[2] + second[2]) == TOTAL - 1  # each image once
    assert min(first[2] + second[2]) >= 4  # both work


def test_failure_on_one_process_is_reported_by_all():
    first, second = scores_with(2, unscored="item 3")
    assert sum("c: ValueError: item 3" in answer for answer in (first[1], second[1])) == 1
    assert sum("another process" in answer for answer in (first[1], second[1])) == 1


def test_missing_stays_missing_and_an_image_alone_is_scored():
    reward = build_rewards({REWARD: 1.0})["unlike_others"]
    scores = reward([gray(10), gray(20), gray(90)], [Item(0, "a"), Item(1, "gap"), Item(1, "gap")])
    assert np.isnan(scores).tolist() == [False, True, True]


def test_journal_knows_a_score_only_among_the_same_images(tmp_path):
    calls = []
    built = build_rewards({REWARD: 1.0}, {REWARD: {"calls": calls}})["unlike_others"]
    reward = JournaledReward(built, "r", ScoreJournal(tmp_path, 0))
    items, images = [Item(0, "a")] * 2 + [Item(1, "b")] * 2, [gray(g) for g in (10, 50, 70, 90)]
    first = reward(images, items)
    assert reward(images, items).tolist() == first.tolist() == [40, 40, 20, 20] and calls == [4]
    changed = [*images[:3], gray(170)]
    assert reward(changed, items).tolist() == [40, 40, 100, 100] and calls == [4, 2]  # the whole changed group, no other


def test_a_service_refuses_it(capsys):
    assert main(["--reward", REWARD]) == 2
    assert "compares the images of a group" in capsys.readouterr().err
