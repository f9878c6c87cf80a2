"""Rewards by name and import path; a mistake names the nearest known name."""

import numpy as np
import pytest
from PIL import Image

from paco_grpo.rewards.registry import REWARDS, RewardError, build_rewards, find_factory
from paco_grpo.types import Item

IMAGES = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
ITEMS = [Item(0, "a"), Item(1, "b")]
OWN, JPEG = "reward_factories:factory", "jpeg_compressibility"


def test_import_path_kwargs_and_device():
    ((name, reward),) = build_rewards({OWN: 2.0}, {OWN: {"scale": 3.0}}, device="cpu").items()
    assert (
        name == "factory"
        and reward(IMAGES, ITEMS).tolist() == [3.0, 3.0]
        and reward.function.device == "cpu"
    )
    reward.check_items(ITEMS)  # a factory need not check them
    assert all(callable(find_factory(name)) for name in REWARDS)


@pytest.mark.parametrize(
    ("reward_fn", "kwargs", "named"),
    [
        ({JPEG: 1}, {JPEG: {"qualty": 3}}, "'qualty'.*'quality'"),
        ({"jpeg_compresibility": 1}, {}, f"'{JPEG}'"),
        ({"reward_factories:factry": 1}, {}, "'factry'.*'factory'"),
        ({"no.such.module:factory": 1}, {}, "no.such.module"),
        ({OWN: 1, "other:factory": 1}, {}, "'factory'"),
        (
            {"reward_factories:wrong": 1},
            {"reward_factories:wrong": {"result": 3}},
            "not a callable",
        ),
        (
            {"consistency_score": 1},
            {"consistency_score": {"base_url": "foo"}},
            "consistency_score.*'foo'",
        ),
        ({JPEG: 1}, {JPEG: {"server": "http://x", "quality": 3}}, "'quality'"),
    ],
)
def test_mistakes_name_what_is_right(reward_fn, kwargs, named):
    with pytest.raises(RewardError, match=named):
        build_rewards(reward_fn, kwargs)


@pytest.mark.parametrize("name", ["consistency_score", "clipscore"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(name):
    kwargs = {"api_key": "hidden\n"} | (
        {"server": "http://127.0.0.1:1"} if name == "clipscore" else {}
    )
    with pytest.raises(RewardError, match="API key") as caught:
        build_rewards({name: 1}, {name: kwargs})
    assert "hidden" not in str(caught.value)


NO_TEXT = Item(7, "a fox")
GRID = Item(8, '1x2 grid of "one" cat. [LEFT]: a. [RIGHT]: b.', references=(IMAGES[0],))


@pytest.mark.parametrize(
    ("name", "kwargs", "bad"),
    [
        ("ocr", {"server": "http://127.0.0.1:9"}, NO_TEXT),
        ("consistency_score", {}, NO_TEXT),
        ("consistency_score", {"question": "criteria"}, GRID),
        ("between_images", {}, NO_TEXT),
        ("subfig_dreamsim", {"server": "http://127.0.0.1:9"}, NO_TEXT),
        ("consistency_for_editing", {}, NO_TEXT),
        (
            "edit_score",
            {"server": "http://127.0.0.1:9"},
            Item(9, "two", references=(IMAGES[0], IMAGES[0])),
        ),
    ],
)
def test_items_that_cannot_be_scored_are_found(name, kwargs, bad):
    (reward,) = build_rewards({name: 1}, {name: kwargs}).values()
    with pytest.raises(RewardError, match=f"item {bad.item_id} .*{name}"):
        reward.check_items([bad] if bad is GRID else [GRID, bad])


@pytest.mark.parametrize(
    "result",
    [
        lambda images, items: np.zeros((2, 2)),
        lambda images, items: [0, np.inf],
        lambda images, items: [0, -1e39],
    ],
)
def test_a_score_that_float32_does_not_hold_is_an_error_that_names_the_reward(result):
    path = "reward_factories:wrong"
    with pytest.raises(RewardError, match="'wrong' returned"):
        build_rewards({path: 1}, {path: {"result": result}})["wrong"](IMAGES, ITEMS)


def returning(result=None, record=None, parallel_calls=1, error=None, error_of_check=None):
    """A factory whose reward returns ``result``; registered below by its import path."""
    if error:
        raise error

    def score(images, items):
        return result

    def check():
        if error_of_check:
            raise error_of_check

    score.record = record
    score.parallel_calls = parallel_calls
    score.check = check
    return score


def needs_a_mapping(item, kwargs):
    raise TypeError("a list has no keys")


def unscorable():
    return returning()


unscorable.check_item = needs_a_mapping
PLACE = f"{__name__}:returning"


def build(**kwargs):
    return build_rewards({PLACE: 1.0}, {PLACE: kwargs})["returning"]


@pytest.mark.parametrize(
    "result",
    [[1 + 2j, 0.5], ["0.5", "0.7"], [b"1", b"2"], [0.5, "0.7"], [[0.5], [0.7]], 0.5, [{}, {}]],
)
def test_what_is_not_one_real_number_for_each_image_is_refused(result):
    with pytest.raises(RewardError, match="reward 'returning' returned"):
        build(result=result)(IMAGES, ITEMS)


@pytest.mark.parametrize(
    ("result", "scores"),
    [
        ([1, 0], [1, 0]),
        ([True, False], [1, 0]),
        ([0.5, None], [0.5, np.nan]),
        (np.float32([1, 2]), [1, 2]),
    ],
)
def test_numbers_of_any_kind_are_scores_and_none_is_missing(result, scores):
    np.testing.assert_array_equal(build(result=result)(IMAGES, ITEMS), scores)


@pytest.mark.parametrize("error", [RuntimeError("no GPU"), OSError("no file"), TypeError("no")])
def test_errors_of_a_factory_and_its_check_are_one_message(error):
    with pytest.raises(RewardError, match=f"returning.*{error}"):
        build(error=error)
    with pytest.raises(RewardError, match=f"'returning' cannot be used: .*{error}"):
        build(error_of_check=error).check()


def test_other_mistakes_of_a_reward_are_found_before_training():
    for parallel_calls in (0, -1, "4", True, 1.5):
        with pytest.raises(RewardError, match="parallel_calls"):
            build(parallel_calls=parallel_calls)
    with pytest.raises(RewardError, match="record is not JSON"):
        build(record={"question": object()})
    reward = build_rewards({f"{__name__}:unscorable": 1.0})["unscorable"]
    with pytest.raises(RewardError, match="item 0 .* by 'unscorable': a list has no keys"):
        reward.check_items(ITEMS)
