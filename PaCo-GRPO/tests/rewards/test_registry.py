"""Rewards by name and import path; every mistake names the nearest right thing."""

import pytest
from PIL import Image

from paco_grpo.rewards.registry import REWARDS, RewardError, build_rewards, find_factory, reward_weights
from paco_grpo.types import Item

IMAGES = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
ITEMS = [Item(0, "a"), Item(1, "b")]


def test_a_bad_value_names_the_reward():
    with pytest.raises(RewardError, match="consistency_score.*'foo' is not an http"):
        build_rewards({"consistency_score": 1.0}, {"consistency_score": {"base_url": "foo"}})


def test_import_path_kwargs_and_device():
    rewards = build_rewards(
        {"reward_factories:factory": 2.0}, {"reward_factories:factory": {"scale": 3.0}}, device="cpu"
    )
    assert list(rewards) == ["factory"]
    assert rewards["factory"](IMAGES, ITEMS).tolist() == [3.0, 3.0]
    assert rewards["factory"].function.device == "cpu"


@pytest.mark.parametrize("name", REWARDS)
def test_every_registered_name_is_there(name):
    assert callable(find_factory(name))


@pytest.mark.parametrize(
    ("reward_fn", "kwargs", "said"),
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
    ],
)
def test_mistakes_name_what_is_right(reward_fn, kwargs, said):
    with pytest.raises(RewardError, match=said):
        build_rewards(reward_fn, kwargs)


@pytest.mark.parametrize(("name", "said"), [("broken_shape", r"shape \(2, 2\) for 2 images"), ("infinite", "infinite")])
def test_answers_are_checked(name, said):
    with pytest.raises(RewardError, match=said):
        build_rewards({f"reward_factories:{name}": 1})[name](IMAGES, ITEMS)


def test_weights_by_short_name():
    assert reward_weights({"jpeg_compressibility": 1, "a.b:c": 0.5}) == {"jpeg_compressibility": 1.0, "c": 0.5}
