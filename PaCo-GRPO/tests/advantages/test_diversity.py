"""Perceptual entropy and GARDO's factors against loops in plain NumPy."""

from functools import partial

import numpy as np
import pytest

from paco_grpo.advantages import compute_advantages
from paco_grpo.advantages.aggregation import weighted_advantage_sum_aggregate_fn, weighted_sum
from paco_grpo.advantages.diversity import nearest_neighbor_factors, perceptual_entropy_bonus
from paco_grpo.options import RunOptions
from paco_grpo.options.schema import TrainOptions

RNG = np.random.default_rng(3)
FEATURES = RNG.normal(size=(9, 5))
GROUPS = [np.array([0, 2, 4, 6]), np.array([1, 3, 5, 7])]  # image 8 is in none


def unit(i):
    return FEATURES[i] / np.sqrt(np.sum(FEATURES[i] ** 2))


def test_entropy_bonus_is_minus_the_log_of_a_leave_one_out_kernel_density():
    distances = [
        np.sqrt(np.sum((unit(i) - unit(j)) ** 2))
        for g in GROUPS
        for a, i in enumerate(g)
        for j in g[a + 1 :]
    ]
    h = np.median(distances)
    found = perceptual_entropy_bonus(FEATURES, GROUPS)
    for group in GROUPS:
        for i in group:
            density = np.mean(
                [np.exp(-np.sum((unit(i) - unit(j)) ** 2) / (2 * h * h)) for j in group if j != i]
            )
            assert found[i] == pytest.approx(-np.log(density))
    assert found[8] == 0
    assert not perceptual_entropy_bonus(np.ones((4, 3)), [np.arange(4)]).any()
    mostly_equal = perceptual_entropy_bonus(
        np.eye(2)[[0, 0, 0, 0, 1]], [np.arange(5)]
    )  # the median distance is 0
    assert mostly_equal == pytest.approx([-np.log((3 + np.exp(-0.5)) / 4)] * 4 + [0.5])


def test_factors_are_the_relative_distance_to_the_nearest_neighbor():
    factors = nearest_neighbor_factors(FEATURES, GROUPS)
    for group in GROUPS:
        nearest = []
        for i in group:
            nearest.append(min(1 - unit(i) @ unit(j) for j in group if j != i))
        np.testing.assert_allclose(factors[group], nearest / np.mean(nearest))
    assert factors[8] == 1
    assert (nearest_neighbor_factors(np.ones((4, 3)), [np.arange(4)]) == 1).all()


def test_what_they_do_to_advantages():
    scores = RNG.normal(size=8)
    ids = np.repeat([0, 1], 4)
    groups = [np.arange(4), np.arange(4, 8)]

    def advantages(**train):
        options = RunOptions(train=TrainOptions(**train))
        aggregate_fn = partial(weighted_sum, {"r": 1.0})
        prompts = ["a"] * 4 + ["b"] * 4
        return compute_advantages(
            {"r": scores}, ids, prompts, aggregate_fn, options, FEATURES[:8]
        ).advantages

    plain = advantages()
    factors = nearest_neighbor_factors(FEATURES[:8], groups)
    np.testing.assert_allclose(
        advantages(neighbor_factor=True), np.where(plain > 0, plain * factors, plain)
    )
    total = scores + 0.3 * perceptual_entropy_bonus(FEATURES[:8], groups)
    expected = [(t - t.mean()) / max(t.std(), 1e-6) for t in np.split(total, 2)]
    np.testing.assert_allclose(
        advantages(perceptual_entropy=0.3), np.concatenate(expected), rtol=1e-12
    )


@pytest.mark.parametrize("global_std", [False, True])
def test_a_bonus_on_advantages_favors_no_group(global_std):
    """The bonus is never negative, and nothing normalizes what such an aggregation returns."""
    scores = {name: RNG.normal(size=8) for name in ("a", "b")}
    weights = {"a": 1.0, "b": 0.5}
    arguments = {
        "item_ids": np.repeat([0, 1], 4),
        "prompts": ["p"] * 4 + ["q"] * 4,
        "aggregate_fn": weighted_advantage_sum_aggregate_fn(weights, global_std),
        "features": FEATURES[:8],
    }
    options = RunOptions(train=TrainOptions(perceptual_entropy=0.5))
    plain = compute_advantages(scores, **arguments, options=RunOptions()).advantages
    advantages = compute_advantages(scores, **arguments, options=options).advantages
    bonus = 0.5 * perceptual_entropy_bonus(FEATURES[:8], [np.arange(4), np.arange(4, 8)])
    for group in (slice(0, 4), slice(4, 8)):
        assert advantages[group].mean() == pytest.approx(0, abs=1e-12)
        change = advantages[group] - plain[group]
        np.testing.assert_allclose(change, bonus[group] - bonus[group].mean(), atol=1e-12)
