"""nft, awm and dgpo: sampled σ, shared noise, identities between them, masks; Flow-DPPO's mask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_policy import ToyPolicy, compare_groups, sample

from paco_grpo.objectives import Step, get_objective, transition
from paco_grpo.objectives.noised import Noised, sample_sigmas
from paco_grpo.options import RunOptions, TrainOptions

f64 = torch.float64


def run_options(**changes):
    return RunOptions(train=TrainOptions(**changes))


def step_of(policy, advantages):
    values = torch.tensor(advantages, dtype=policy.dtype)
    return Step(sample(policy, moved=False), 2, values, epoch_seed=7)


# --- σ
# --------------------------------------------------------------------------------------------------


@given(
    st.integers(2, 50), st.booleans(), st.floats(0.1, 1.0), st.integers(1, 6), st.integers(0, 10**6)
)
def test_sampled_sigmas(num_steps, with_one, fraction, count, seed):
    first = 0 if with_one else 1
    end = math.floor(num_steps * fraction + 1e-9)
    assume(count <= end - first)
    steps, again = (
        sample_sigmas(num_steps, count, fraction, with_one, np.random.default_rng(seed))
        for _ in range(2)
    )
    assert steps == sorted(set(steps)) == again and len(steps) == count
    bounds = np.floor(np.linspace(first, end, count + 1) + 1e-9)
    assert all(
        low <= step < high for low, step, high in zip(bounds, steps, bounds[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("with_one", "fraction", "steps"), [(True, 0.75, [0, 1, 2]), (False, 0.5, [1])]
)
def test_steps_are_those_of_the_options(with_one, fraction, steps):
    """All of the four that there are to sample from."""
    options = {"num_sigmas": len(steps), "sigma_one": with_one, "sigma_fraction": fraction}
    objective = get_objective("awm")(run_options(**options))
    assert objective.steps(sample(ToyPolicy()), np.random.default_rng(0)) == steps
    drawn = set()
    for seed in range(40):
        drawn.update(sample_sigmas(8, 2, fraction, with_one, np.random.default_rng(seed)))
    first, end = (0, 6) if with_one else (1, 4)
    assert drawn == set(range(first, end))


def test_noise_of_samples_and_of_groups():
    policy = ToyPolicy()
    step = step_of(policy, (1.0, 0.0, -1.0))  # items 0, 1, 0

    def noise(step, shared):
        return (
            (Noised(step, policy, shared).target + step.rollout.clean_latents)
            .double()
            .round(decimals=4)
        )

    own = noise(step, False)
    shared = noise(step, True)
    assert torch.equal(shared[0], shared[2]) and len(torch.unique(own.flatten(1), dim=0)) == 3
    assert not torch.equal(shared[0], shared[1])
    one = Step(step.rollout.select([2]), 2, step.advantages[2:], epoch_seed=7)
    for kind, all_of in ((False, own), (True, shared)):
        assert torch.equal(noise(one, kind)[0], all_of[2])
    assert not torch.equal(
        noise(Step(step.rollout, 2, step.advantages, epoch_seed=8), True), shared
    )
    others = [
        noise(Step(step.rollout, 2, step.advantages, inner_epoch=1), False),
        noise(Step(step.rollout, 1, step.advantages), False),
    ]
    distinct = torch.unique(torch.stack([own, *others]).flatten(1), dim=0)
    assert len(distinct) == 3  # each inner epoch and each step has noise of its own


def test_names_of_snapshots():
    """How they follow, and when images are sampled with them: test_options.py."""

    def names(name, **changes):
        objective = get_objective(name)(run_options(**changes))
        return [snapshot.name for snapshot in objective.snapshots]

    assert names("awm") == ["slow"]
    assert names("awm", awm_slow_beta=0.0, num_inner_epochs=2) == ["old"]
    assert names("dgpo") == ["slow"]
    assert names("dgpo", dgpo_clip_range=None) == []


# --- identities
# --------------------------------------------------------------------------------------------------


def dgpo_loss(step, policy, train):
    objective = get_objective("dgpo")(RunOptions(train=train))
    compare_groups(objective, [step], policy)
    return objective.loss(step, policy)


def test_dgpo_masks_what_moved_far_enough():
    """Weights that lower e of all samples: the good one is masked beyond ε, the bad one must still
    move back.
    """
    policy = ToyPolicy(dtype=f64)
    step = step_of(policy, (1.0, 0.0, -1.0))
    noised = Noised(step, policy, shared=True)
    for _ in range(20):
        error = noised.error(noised.velocity()).sum()
        (gradient,) = torch.autograd.grad(error, policy.transformer.current)
        with torch.no_grad():
            policy.transformer.current.sub_(0.05 * gradient)
    lower = noised.error(noised.velocity("slow")) - noised.error(noised.velocity())
    assert (lower[[0, 2]] > 1e-3).all()
    for limit, masked in ((1e-3, [1.0, 0.0]), (100.0, [0.0, 0.0])):
        terms = dgpo_loss(step, policy, TrainOptions(dgpo_clip_range=limit))
        assert terms.metrics["masked_share"][[0, 2]].tolist() == masked
        for row, share in zip((0, 2), masked, strict=True):
            (moves,) = torch.autograd.grad(
                terms.loss[row], policy.transformer.current, retain_graph=True
            )
            assert moves.any() != bool(share)


# --- Flow-DPPO
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_flow_dppo_masks_two_of_four_quadrants(beyond, sign):
    """μ_old lies √(2τ)·d·(1 ± 1e-3) from μ; x' on one side of both or the other makes the ratio
    more or less than 1.
    """
    policy = ToyPolicy(dtype=f64)
    train = TrainOptions()
    step = step_of(policy, (sign, -sign, sign))
    trained = transition(policy, step.rollout, step.noise.latents, step.index)
    mean = trained.mean.detach()
    std = float(trained.std[0])
    change = math.sqrt(2 * train.dppo_divergence) * std * (1.001 if beyond else 0.999)
    step.noise.mean = mean - change
    for towards in (1, -1):  # x' towards μ: the ratio is above 1
        step.noise.next_latents = mean - change / 2 + towards * std
        terms = get_objective("flow_dppo")(RunOptions(train=train)).loss(step, policy)
        ratio = terms.metrics["ratio_mean"].detach()
        assert ((ratio > 1) == (towards > 0)).all()
        masked = beyond & ((step.advantages > 0) == (towards > 0))
        expected = torch.where(masked, 0.0, -step.advantages * ratio)
        torch.testing.assert_close(terms.loss.detach(), expected)
        assert torch.equal(
            terms.metrics["masked_positive"] + terms.metrics["masked_negative"], masked.float()
        )
        assert terms.metrics["beyond_share"].unique().tolist() == [float(beyond)]


def test_flow_dppo_masks_a_ratio_that_overflows():
    policy = ToyPolicy(dtype=f64)
    step = step_of(policy, (3.0, 2.0, 1.0))
    trained = transition(policy, step.rollout, step.noise.latents, step.index)
    step.noise.mean = trained.mean.detach() - 60 * float(trained.std[0])
    step.noise.next_latents = trained.mean.detach()
    loss = get_objective("flow_dppo")(run_options()).loss(step, policy).loss
    loss.sum().backward()
    assert loss.tolist() == [0, 0, 0]
    assert not any(parameter.grad.any() for parameter in policy.transformer.parameters())


@pytest.mark.parametrize("name", ["ppo", "guard_grpo", "flow_dppo"])
def test_old_values_are_recomputed_from_a_deviation_of_1(name):
    """A quarter of the clip range, or a tenth of τ."""
    policy = ToyPolicy(dtype=f64)
    train = TrainOptions()
    step = step_of(policy, (1.0, 1.0, 1.0))
    objective = get_objective(name)(RunOptions(train=train))
    assert objective.first_deviation(step, policy).tolist() == [0, 0, 0]
    trained = transition(policy, step.rollout, step.noise.latents, step.index)
    step.noise.mean = trained.mean.detach() + math.sqrt(
        2 * train.dppo_divergence / 10
    ) * trained.std.view(-1, 1, 1)
    step.noise.log_prob = step.noise.log_prob - math.log(1 + train.clip_range / 4)
    assert objective.first_deviation(step, policy).tolist() == pytest.approx([1, 1, 1])
