"""Each image is scored with its own item by every reward, in whatever order, call and process."""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
from accelerate import Accelerator
from fakes import free_port
from wired import (
    IMAGES,
    ITEM_IDS,
    ITEMS,
    LEFT_OUT,
    OCR_SCORES,
    SEEDS,
    edit_scores,
    read_text,
    scores_on,
    share_of,
    shown_to_judge,
    submit_in_parts,
)

from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.rewards.registry import REWARDS, build_rewards

ORDER = [4, 9, 0, 12, 7, 2, 10, 5, 1, 8, 3, 11, 6]  # in which images are decoded
OF_JUDGE = ("consistency_score", "between_images", "win_rate", "consistency_for_editing")


@pytest.fixture
def kwargs(judge, clip_folder, tiny_open_clip, packages, tmp_path, monkeypatch):
    """The arguments of every registered reward."""
    monkeypatch.setattr("paco_grpo.rewards.ocr._rapidocr", lambda threads: read_text)
    open_clip = dict(zip(("model", "pretrained"), tiny_open_clip, strict=True))
    clip = {"model": clip_folder, "processor": clip_folder}
    arguments = {name: {"base_url": judge.url} for name in (*OF_JUDGE, "grid_layout")}
    arguments |= {"edit_score": {"base_url": judge.url, "num_pass": 2}}
    arguments |= {"clipscore": clip, "pickscore": clip, "ocr": {"threads": 1}}
    of_open_clip = ("subfig_clipI", "subfig_clipT", "reference_clipI")
    arguments |= dict.fromkeys(of_open_clip, open_clip)
    arguments |= {"subfig_dreamsim": {"cache_dir": str(tmp_path)}, "imagereward": {}}
    arguments |= {"jpeg_compressibility": {}, "jpeg_incompressibility": {}}
    question = tmp_path / "unified.txt"
    question.write_text("Caption: {prompt}")
    arguments["unified_reward"] = {"base_url": judge.url, "question": str(question)}
    arguments["geneval2"] = {"base_url": judge.url}
    edit_reward = {"checkpoint": "a", "config": "b", "batch_size": 3}
    arguments |= {"hpsv3": {"batch_size": 3}, "edit_reward": edit_reward}
    faces = lambda image: np.array([[share_of(image.tobytes())]])  # of one number
    monkeypatch.setattr("paco_grpo.rewards.identity._finder", lambda: faces)
    arguments |= {"face_likeness": {}, "kept_pixels": {"tolerance": 70}}
    assert {*arguments, "votes"} == set(REWARDS)  # which people give: test_people.py
    return arguments


def scores_alone(reward) -> np.ndarray:
    """Scores of images that are scored one by one, or item by item where they are compared.

    The one that is left out has none.
    """
    scores = np.full(len(IMAGES), np.nan)
    keys = ITEM_IDS if reward.compares_images else range(len(IMAGES))
    for key in set(keys):
        positions = [position for position, other in enumerate(keys) if other == key]
        if LEFT_OUT in positions:
            positions.remove(LEFT_OUT)
        images = [IMAGES[position] for position in positions]
        items = [ITEMS[position] for position in positions]
        if images:
            scores[positions] = reward(images, items, [SEEDS[position] for position in positions])
    return scores


def test_every_reward_scores_each_image_with_its_own_item(kwargs):
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs)
    columns = []
    for name, reward in rewards.items():
        columns.append(scores_alone(reward))
        assert len(set(np.round(columns[-1], 9))) == len(IMAGES), name
    expected = np.stack(columns, axis=1)
    assert len(set(expected[0].round(9))) == len(rewards)
    of_ocr = np.delete(columns[list(rewards).index("ocr")], LEFT_OUT)
    np.testing.assert_allclose(of_ocr, np.delete(OCR_SCORES, LEFT_OUT))
    queue = ScoreQueue(rewards, 4)
    submit_in_parts(queue, ORDER, ORDER)
    scores = queue.gathered(Accelerator(cpu=True), len(IMAGES), lambda: False)
    queue.close()
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_processes_exchange_the_images_of_an_item_and_nothing_else(judge):
    kwargs = {name: {"base_url": judge.url} for name in OF_JUDGE} | {"jpeg_compressibility": {}}
    kwargs |= {"wired:drawn_from": {}, "wired:compared_from": {}}
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs)
    expected = np.stack([scores_alone(reward) for reward in rewards.values()], axis=1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wired"])
    answers = context.Queue()
    port = free_port()
    for rank in range(2):
        arguments = (rank, 2, port, kwargs, answers)
        # If one fails, the other may wait for it for ever.
        context.Process(target=scores_on, args=arguments, daemon=True).start()
    errors = []
    for _ in range(2):
        scores, error = answers.get(timeout=240)
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        assert f"unlike_others: ValueError: {ITEMS[0].prompt}" in error
        errors.append(error)
    assert sum("another process" in error for error in errors) == 1  # one fails, both report it


def test_edit_score_averages_passes_that_differ(judge, packages):
    """Each pass has its own seed, and the lower of two scores counts."""
    kwargs = {"base_url": judge.url, "num_pass": 3, "score_range": 40}
    (reward,) = build_rewards({"edit_score": 1.0}, {"edit_score": kwargs}).values()
    scores = reward(IMAGES[:2], ITEMS[:2])
    passes = {0: {}, 1: {}}  # image → seed → product of the lower scores
    for request in judge.requests:
        shown = shown_to_judge(request)
        (number,) = [i for i in range(2) if IMAGES[i].tobytes() in shown]
        is_edit = "edit, 0 to 40" in shown[-1]
        assert is_edit or "quality, 0 to 40" in shown[-1]
        if is_edit:
            assert shown[1] == ITEMS[number].image.tobytes() and ITEMS[number].prompt in shown[-1]
        assert len(shown) == (5 if is_edit else 3)
        lowest = min(edit_scores(shown, request["seed"])) / 40
        products = passes[number]
        products[request["seed"]] = products.get(request["seed"], 1.0) * lowest
    for number, products in passes.items():
        assert len(products) == 3
        assert scores[number] == pytest.approx(np.sqrt(list(products.values())).mean())


def test_edit_score_of_a_dimension_is_one_of_the_edits_two_scores(judge, packages):
    kwargs = {"base_url": judge.url, "num_pass": 2}
    (reward,) = build_rewards({"edit_score": 1.0}, {"edit_score": kwargs}).values()
    items = []
    for item, dimension in zip(ITEMS, ("prompt_following", "consistency")):
        items.append(replace(item, metadata={"edit_score_dimension": dimension}))
    scores = reward(IMAGES[:2], items)
    passes = [[], []]
    for request in judge.requests:
        shown = shown_to_judge(request)
        if "edit, 0 to" in shown[-1]:
            (number,) = [i for i in range(2) if IMAGES[i].tobytes() in shown]
            passes[number].append(edit_scores(shown, request["seed"])[number] / 25)
    assert scores == pytest.approx([np.mean(of_image) for of_image in passes])
    assert reward(IMAGES[:1], ITEMS[:1])[0] not in scores
    with pytest.raises(ValueError, match="style"):
        reward.check_items([replace(ITEMS[0], metadata={"edit_score_dimension": "style"})])
