"""Rewards by name and import path; a mistake names the nearest known name."""

import numpy as np
import pytest
from PIL import Image

from paco_grpo.rewards.registry import REWARDS, RewardError, build_rewards, find_factory
from paco_grpo.types import Item

IMAGES = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
ITEMS = [Item(0, "a"), Item(1, "b")]


def test_import_path_kwargs_and_device():
    rewards = build_rewards(
        {"reward_factories:factory": 2.0}, {"reward_factories:factory": {"scale": 3.0}}, device="cpu"
    )
    assert list(rewards) == ["factory"]
    assert rewards["factory"](IMAGES, ITEMS).tolist() == [3.0, 3.0]
    assert rewards["factory"].function.device == "cpu"
    rewards["factory"].check_items(ITEMS)  # a factory need not check them


@pytest.mark.parametrize("name", REWARDS)
def test_every_registered_name_is_there(name):
    assert callable(find_factory(name))


@pytest.mark.parametrize(
    ("reward_fn", "kwargs", "named"),
    [
        ({"jpeg_compresibility": 1}, {}, "Did you mean 'jpeg_compressibility'"),
        (
            {"jpeg_compressibility": 1},
            {"jpeg_compressibility": {"qualty": 3}},
            "no argument 'qualty'. Did you mean 'quality'",
        ),
        ({"jpeg_compressibility": 1}, {"jpeg_compresibility": {}}, "Did you mean 'jpeg_compressibility'"),
        ({"reward_factories:factry": 1}, {}, "no factory 'factry'. Did you mean 'factory'"),
        ({"no.such.module:factory": 1}, {}, "cannot be imported"),
        ({"reward_factories:factory": 1, "other:factory": 1}, {}, "two rewards are called 'factory'"),
        ({"reward_factories:not_callable": 1}, {}, "not a callable"),
        ({"consistency_score": 1}, {"consistency_score": {"base_url": "foo"}}, "consistency_score.*'foo' is not an http"),
    ],
)
def test_mistakes_name_what_is_right(reward_fn, kwargs, named):
    with pytest.raises(RewardError, match=named):
        build_rewards(reward_fn, kwargs)


@pytest.mark.parametrize("name", ["consistency_score", "grid_layout", "clipscore"])
def test_a_key_that_no_header_can_hold_is_one_sentence_without_the_key(name):
    kwargs = {"api_key": "hidden\n"} | ({"server": "http://127.0.0.1:1"} if name == "clipscore" else {})
    with pytest.raises(RewardError, match="the API key has a line break") as caught:
        build_rewards({name: 1}, {name: kwargs})
    assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["broken_shape", "infinite"])
def test_scores_are_checked(name):
    with pytest.raises(RewardError, match=f"{name}.*(shape|score of inf)"):
        build_rewards({f"reward_factories:{name}": 1})[name](IMAGES, ITEMS)


NO_TEXT = Item(7, "a fox")
GRID = Item(
    8, 'A 2x2 grid layout of "one" cat. [TOP]-[LEFT]: a. [TOP]-[RIGHT]: b. [BOTTOM]-[LEFT]: c. [BOTTOM]-[RIGHT]: d.'
)


@pytest.mark.parametrize(
    ("name", "kwargs", "bad", "named"),
    [
        ("ocr", {"server": "http://127.0.0.1:9"}, NO_TEXT, "double quotes.*'a fox'"),
        ("ocr", {"reader": "reward_factories:factory"}, NO_TEXT, "double quotes"),
        ("consistency_score", {}, NO_TEXT, "consistency_score"),
        ("consistency_score", {"question": "criteria"}, GRID, "consistency_score"),
        ("grid_layout", {}, NO_TEXT, "grid_layout"),
        ("subfig_clipI", {}, NO_TEXT, "subfig_clipI"),
        ("subfig_dreamsim", {"server": "http://127.0.0.1:9"}, NO_TEXT, "subfig_dreamsim"),
        ("reward_factories:checking", {"longest": 200}, Item(9, "x" * 201), "longer than 200"),
    ],
)
def test_items_that_cannot_be_scored_are_found(name, kwargs, bad, named):
    (reward,) = build_rewards({name: 1}, {name: kwargs}).values()
    if bad is not GRID:
        reward.check_items([GRID])
    with pytest.raises(RewardError, match=f"item {bad.item_id} .*{named}"):
        reward.check_items([bad] if bad is GRID else [GRID, bad])


@pytest.mark.parametrize("score", [np.inf, 1e300, -1e39])
def test_a_score_beyond_float32_is_an_error_that_names_the_reward(score):
    reward = build_rewards({"reward_factories:factory": 1.0}, {"reward_factories:factory": {"scale": score}})["factory"]
    with pytest.raises(RewardError, match="'factory' returned a score of"):
        reward([None], [None])
