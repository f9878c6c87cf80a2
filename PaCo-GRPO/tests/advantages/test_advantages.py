"""Advantages and aggregations against plain loops in NumPy, over random groups (docs/method.md
§5).
"""

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paco_grpo.advantages.aggregation import (
    describe,
    get_aggregate_fn,
    harmonic_mean_aggregate_fn,
    log_tame_aggregate_fn,
    weighted_advantage_sum_aggregate_fn,
    weighted_sum,
)
from paco_grpo.advantages.groups import compute_advantages
from paco_grpo.options import RunOptions
from paco_grpo.options.schema import SampleOptions, TrainOptions

WEIGHTS = {"a": 0.2, "b": 1.5}
WEIGHTED = partial(weighted_sum, WEIGHTS)
DEFAULT = RunOptions()


@st.composite
def epochs(draw, missing=0.2):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    items = rng.permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    rewards = {name: rng.integers(0, 5, len(items)) / 4 for name in WEIGHTS}
    for values in rewards.values():
        values[rng.random(len(items)) < missing] = np.nan
    return rewards, items, [f"prompt {i}" for i in items]


def expected(total, items, global_std, per_prompt=True):
    """Advantages, and which samples are kept."""
    totals = pd.Series(total)
    groups = totals.groupby(items if per_prompt else np.zeros(len(items)))
    kept = totals.notna() & (groups.transform("count") >= 2)
    spread = totals[kept].std(ddof=0) if global_std else groups.transform("std", ddof=0)
    advantages = (totals - groups.transform("mean")) / np.maximum(spread, 1e-6)
    return advantages.where(kept, 0).to_numpy(), kept.to_numpy()


@given(epochs(), st.booleans(), st.booleans(), st.integers(1, 2))
def test_weighted_sum(epoch, global_std, per_prompt, images):
    """With one image of a prompt, also prompts that an epoch repeats are no groups."""
    rewards, items, prompts = epoch
    sample = SampleOptions(global_std=global_std, num_images_per_prompt=images)
    options = RunOptions(sample=sample, per_prompt_stat_tracking=per_prompt)
    result = compute_advantages(rewards, items, prompts, WEIGHTED, options)
    total = 0.2 * rewards["a"] + 1.5 * rewards["b"]
    advantages, kept = expected(total, items, global_std, per_prompt and images > 1)
    np.testing.assert_array_equal(result.kept, kept)
    np.testing.assert_allclose(result.advantages, advantages, atol=1e-8)
    assert np.isfinite(result.advantages).all() and (result.advantages[~kept] == 0).all()
    assert result.stats["missing_share"] == pytest.approx(np.isnan(total).mean())
    assert result.stats["dropped_share"] == pytest.approx(1 - kept.mean())
    is_grouped = per_prompt and images > 1
    num_groups = len(set(items[kept])) if is_grouped else int(kept.any())
    assert result.stats["group_size_mean"] == pytest.approx(kept.sum() / max(num_groups, 1))
    mean_abs = np.abs(advantages).sum() / max(kept.sum(), 1)
    assert result.stats["mean_abs"] == pytest.approx(mean_abs, abs=1e-8)


@settings(max_examples=50)
@given(epochs(missing=0.0))
def test_rank(epoch):
    rewards, items, prompts = epoch
    assume(min(np.unique(items, return_counts=True)[1]) >= 2)
    groups = pd.DataFrame(rewards).groupby(items)
    ranks = (groups.rank() - 1) / (groups.transform("count") - 1)
    total = (ranks * WEIGHTS).sum(axis=1)
    options = RunOptions(train=TrainOptions(rank_grpo=True))
    result = compute_advantages(rewards, items, prompts, WEIGHTED, options)
    np.testing.assert_allclose(result.advantages, expected(total, items, False)[0], atol=1e-8)


def test_items_that_share_a_prompt_stay_apart():
    seen = {}

    def spy(**grouped):
        seen.update(grouped["a"])
        return grouped["a"]

    result = compute_advantages(
        {"a": [0.0, 1, 10, 11, 5, 6]},
        [0, 0, 1, 1, 2, 2],
        ["x"] * 4 + ["y"] * 2,
        spy,
        DEFAULT,
    )
    assert {k: v.tolist() for k, v in seen.items()} == {
        "x [item 0]": [0, 1],
        "x [item 1]": [10, 11],
        "y": [5, 6],
    }
    np.testing.assert_allclose(result.advantages, [-1, 1] * 3)
    half = compute_advantages({"a": [1.0, 1, 2, 3]}, [0, 0, 1, 1], "xxyy", WEIGHTED, DEFAULT)
    assert half.stats["zero_std_share"] == 0.5
    equal = compute_advantages({"a": [0.1] * 7}, [0] * 7, ["x"] * 7, WEIGHTED, DEFAULT)
    assert np.abs(equal.advantages).max() < 1e-9 and equal.stats["zero_std_share"] == 1


LONG = 80 * "x"


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({"z": [2.0, 3.0]}, "^it must return the keys of its arguments; 'x{57}...' is in"),
        ({LONG: [1.0]}, r"shape \(2,\) for 'x{57}...', got \(1,\)$"),
        ({LONG: [1.0, np.nan]}, "finite numbers, got nan for image 1 of 'x{57}...'$"),
    ],
)
def test_an_aggregation_returns_a_finite_number_for_each_image(totals, words):
    with pytest.raises(ValueError, match=words):
        compute_advantages({"a": [2.0, 3.0]}, [0, 0], [LONG, LONG], lambda a: totals, DEFAULT)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("harmonic_mean", {}, "harmonic_mean_aggregate_fn"),
        ("log_tame_aggregate_fn", {"global_std": True}, "'global_std'"),
        ("product_aggregate_fn", {"reward_weights": {"a": 1.0, "bb": 2.0}}, "lack b"),
        (None, {"threshold": 0.5}, "threshold.*only log_tame_aggregate_fn"),
        ("os:getcwd", {}, "os:getcwd.*'a'"),
        ("os:sep", {}, "os:sep"),
    ],
)
def test_what_is_wrong_is_named_before_an_epoch(name, arguments, named):
    spec = {"name": name, "arguments": arguments} if arguments else name
    with pytest.raises(ValueError, match=f"config.train.aggregate_fn.*{named}"):
        get_aggregate_fn(spec, WEIGHTS)


def test_a_function_that_a_saved_run_cannot_find_again_is_refused():
    with pytest.raises(ValueError, match="config.train.aggregate_fn"):
        describe(lambda a: a)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("geometric_mean_aggregate_fn", lambda a, b: (a * b) ** 0.5),
        ("harmonic_mean_aggregate_fn", lambda a, b: 2 * a * b / (a + b)),
        ("product_aggregate_fn", lambda a, b: a**0.2 * b**1.5),
    ],
)
def test_means_and_product(name, formula):
    rng = np.random.default_rng(0)
    function = get_aggregate_fn(name, WEIGHTS)
    rewards = {}
    for reward, scale in (("a", 1.0), ("b", 30.0)):
        rewards[reward] = {key: rng.uniform(0, scale, 4) for key in ("p", "q")}
    rewards["a"]["p"][0] = 0.0
    for key, values in function(**rewards).items():
        np.testing.assert_allclose(values, formula(rewards["a"][key], rewards["b"][key]))
    rewards["b"]["q"][1] = -0.1
    with pytest.raises(ValueError, match="'b'"):
        function(**rewards)


@pytest.mark.parametrize(
    ("threshold", "tamed"),
    [("mean", {"a"}), ("median", {"a", "c"}), (10.0, set()), (0.0, {"a", "b", "c", "d"})],
)
def test_log_tame(threshold, tamed):
    rewards = {
        "a": [0.0, 1, 30, 2, 0],  # varies a lot
        "b": [0.8, 0.9, 1, 1, 0.7],
        "c": [-0.2, -0.6, -0.4, -0.3, -0.2],
        "d": [2, 2.1, 2.2, 2.3, 2.4],
    }
    weights = WEIGHTS | {"c": 3.0, "d": 0.7}
    function = log_tame_aggregate_fn(threshold=threshold, reward_weights=weights)
    groups = {name: dict(zip("pq", np.split(values, [3]))) for name, values in rewards.items()}
    result = function(**groups)
    total = 0.0
    for name, values in rewards.items():
        total += weights[name] * (np.log1p(values) if name in tamed else np.array(values))
        variation = np.std(values) / abs(np.mean(values))
        assert function.stats[f"cv/{name}"] == pytest.approx(variation)
        assert function.stats[f"log_tamed/{name}"] == (name in tamed)
    np.testing.assert_allclose([*result["p"], *result["q"]], total)
    with pytest.raises(ValueError, match="'a'"):
        log_tame_aggregate_fn(threshold=0.0)(a={"p": np.array([-1.0, 4])})


@pytest.mark.parametrize("batch_std", [False, True])
@pytest.mark.parametrize("global_std", [False, True])
def test_weighted_advantage_sum(global_std, batch_std):
    rng = np.random.default_rng(3)
    a = rng.random(6)
    b = 100 * rng.random(6)
    items = np.array([0, 0, 0, 1, 1, 1])
    arguments = {"global_std": global_std, "batch_std": batch_std}
    spec = {"name": "weighted_advantage_sum_aggregate_fn", "arguments": arguments}
    function = get_aggregate_fn(spec, WEIGHTS)
    result = compute_advantages({"a": a, "b": b}, items, items.astype(str), function, DEFAULT)
    by_hand = 0.2 * expected(a, items, global_std)[0] + 1.5 * expected(b, items, global_std)[0]
    if batch_std:
        by_hand /= np.sqrt(np.mean(by_hand**2))  # the mean is 0
    np.testing.assert_allclose(result.advantages, by_hand)


def test_an_aggregation_is_saved_and_found_again():
    for function in (None, harmonic_mean_aggregate_fn, np.mean):
        assert get_aggregate_fn(json.loads(json.dumps(describe(function)))) is function
    tamed = log_tame_aggregate_fn(0.6, WEIGHTS), log_tame_aggregate_fn("median")
    for made in (*tamed, weighted_advantage_sum_aggregate_fn(WEIGHTS, True)):
        again = get_aggregate_fn(
            json.loads(json.dumps(describe(made))), {"a": 9.0}, global_std=False
        )
        assert type(again) is type(made) and describe(again) == describe(made)
