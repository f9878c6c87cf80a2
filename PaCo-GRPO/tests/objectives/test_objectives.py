"""Every objective: against NumPy in float64, gradients against finite differences, batch mates,
number of forwards.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from named import load as load_named
from toy_policy import ToyPolicy, compare_groups, numpy_step, sample

from paco_grpo.objectives import (
    OBJECTIVES,
    LossOutput,
    Objective,
    Step,
    create_objective,
    get_objective,
)
from paco_grpo.objectives.groups import MeasuredSample, set_group_values
from paco_grpo.options import RunOptions, TrainOptions
from paco_grpo.options.schema import DatasetOptions, SampleOptions
from paco_grpo.sampling.denoise import step_noise

NAMES = sorted(OBJECTIVES)
ADVANTAGES = (1.5, -0.5, 5.0)


# Trains on the noise steps, with an old policy in awm, without dgpo's mask (in test_forward.py).
FORWARD = {
    "timesteps": (0, 2),
    "gradient_step_per_epoch": 2,
    "dgpo_clip_range": None,
    "dgpo_beta": 3.0,
    "dpo_beta": 1.7,
    "crd_beta": 0.6,
    "opd_teachers": {"x": "teacher"},
}


def train_options(**changes):
    return TrainOptions(**{"clip_range": 0.05, "nft_beta": 0.7} | FORWARD | changes)


def run_options(**changes):
    return RunOptions(train=train_options(**changes))


def evaluate(name, result, policy, train, advantages=ADVANTAGES):
    """Losses (B, steps) and metrics (B, steps) over the objective's own steps."""
    objective = get_objective(name)(RunOptions(train=train))
    values = torch.tensor(advantages[: len(result)], dtype=result.clean_latents.dtype)
    indices = objective.steps(result, np.random.default_rng(0))
    steps = [Step(result, index, values, epoch_seed=5) for index in indices]
    if objective.whole_groups:
        compare_groups(objective, steps, policy)
    outputs = [objective.loss(step, policy) for step in steps]
    losses = torch.stack([output.loss for output in outputs], dim=1)
    metrics = {}
    for key in outputs[0].metrics:
        metrics[key] = torch.stack([output.metrics[key] for output in outputs], dim=1)
    return losses, metrics


def mean_square(difference):
    """(B,), of each sample alone."""
    return np.mean(difference**2, axis=(1, 2))


class NumpyLoss:
    """docs/method.md §6 in float64, with transitions recomputed from plain velocities.

    ``x``, velocities and noise are (B, N, C).
    """

    def __init__(self, name, policy, result, train):
        self.name = name
        self.weights = policy.transformer
        self.result = result
        self.train = train
        self.clean = result.clean_latents.numpy()
        self.direction = result.conditioning.direction.numpy()
        self.sigmas = result.sigmas.tolist()
        self.advantages = np.array(ADVANTAGES)

    def losses(self):
        """(B, steps)"""
        term = getattr(self, self.name, self.ratio)
        return np.stack([term(step) for step in self.result.noise_steps], axis=1)

    def velocity(self, weights, x, sigma):
        scale, shift = weights.detach().numpy()
        return scale * x + shift * sigma * self.direction

    def noised(self, index, seeds):
        """σ of a step, noise, and the clean latents' mixture with it."""
        sigma = self.sigmas[index]
        place = (1 << 20) + index
        noise = step_noise(seeds, place, self.result.clean_latents).double().numpy()
        return sigma, noise, (1 - sigma) * self.clean + sigma * noise

    def error(self, weights, index, seeds):
        sigma, noise, x = self.noised(index, seeds)
        return mean_square(self.velocity(weights, x, sigma) - (noise - self.clean))

    def distance(self, weights, index, seeds):
        """Of the current velocity from another."""
        sigma, _, x = self.noised(index, seeds)
        current = self.velocity(self.weights.current, x, sigma)
        return mean_square(current - self.velocity(weights, x, sigma))

    def kl(self, index, seeds):
        return self.train.beta * self.distance(self.weights.base, index, seeds)

    def awm(self, step):
        index = step.index
        seeds = self.result.seeds.tolist()

        def log_likelihood(weights):
            error = self.error(weights, index, seeds)
            return -self.sigmas[index] * 4 * ((error + 1e-10) ** 0.25 - 1e-10**0.25)

        ratio = np.exp(log_likelihood(self.weights.current) - log_likelihood(self.weights.old))
        clip_range = self.train.awm_clip_range
        clipped = np.clip(ratio, 1 - clip_range, 1 + clip_range)
        advantages = self.advantages / self.train.adv_clip_max
        loss = np.maximum(-advantages * ratio, -advantages * clipped)
        slow = self.distance(self.weights.slow, index, seeds)
        return loss + self.train.awm_slow_beta * slow + self.kl(index, seeds)

    def dgpo(self, step):
        items = self.result.item_ids.numpy()
        seeds = [(5 << 32) + int(item) for item in items]  # of whole groups
        is_slow = self.train.dgpo_reference == "slow"
        reference = self.weights.slow if is_slow else self.weights.base
        error = self.error(self.weights.current, step.index, seeds)
        change = error - self.error(reference, step.index, seeds)
        weights = np.empty(len(items))
        for item in items:
            group = items == item
            advantages = self.advantages[group] - self.advantages[group].mean()
            total = self.train.dgpo_beta * np.mean(advantages * change[group])
            weights[group] = advantages / (1 + np.exp(-total))
        return weights * error + self.kl(step.index, seeds)

    def dpo(self, step):
        """The best and worst of item 0 are samples 2 and 0; item 1 has no pair."""
        seeds = [(5 << 32) + int(item) for item in self.result.item_ids]
        error = self.error(self.weights.current, step.index, seeds)
        change = error - self.error(self.weights.base, step.index, seeds)
        z = -self.train.dpo_beta / 2 * (change[2] - change[0])
        weight = np.array([-1, 0, 1]) * self.train.dpo_beta / (1 + np.exp(z))
        return weight * error + self.kl(step.index, seeds)

    def crd(self, step):
        loss = self.joint_crd(self.weights.current, step.index)
        return loss + self.kl(step.index, self.result.seeds.tolist())

    def joint_crd(self, weights, index, normalizer=None):
        seeds = self.result.seeds.tolist()
        sigma, noise, x = self.noised(index, seeds)

        def scaled_error(weights, normalizer=None):
            difference = self.velocity(weights, x, sigma) - (noise - self.clean)
            if normalizer is None:
                normalizer = np.abs(difference).mean(axis=(1, 2))
            return mean_square(difference) / normalizer

        implicit = scaled_error(self.weights.old) - scaled_error(weights, normalizer)
        clip = self.train.adv_clip_max
        preference = np.clip(self.advantages / (2 * clip) + 0.5, 0, 1)
        loss = np.empty(3)
        for group in ([0, 2], [1]):
            target = preference[group] - preference[group].mean()
            reached = self.train.crd_beta * (implicit[group] - implicit[group].mean())
            loss[group] = clip / self.train.crd_beta * (reached - target) ** 2
        return loss

    def nft(self, step):
        seeds = self.result.seeds.tolist()
        sigma, _, x = self.noised(step.index, seeds)
        current = self.velocity(self.weights.current, x, sigma)
        old = self.velocity(self.weights.old, x, sigma)
        beta = self.train.nft_beta
        positive = beta * current + (1 - beta) * old
        negative = (1 + beta) * old - beta * current
        share = np.clip(self.advantages / self.train.adv_clip_max / 2 + 0.5, 0, 1)
        total = 0.0
        for part, velocity in ((share, positive), (1 - share, negative)):
            error = x - sigma * velocity - self.clean
            normalizer = np.maximum(np.abs(error).mean(axis=(1, 2)), 1e-5)
            total += part * mean_square(error) / normalizer
        return self.train.adv_clip_max / beta * total + self.kl(step.index, seeds)

    def transition(self, weights, step):
        """Mean, scale of the noise, and standard deviation."""
        sigma, following = self.sigmas[step.index : step.index + 2]
        x = step.latents.numpy()
        velocity = self.velocity(weights, x, sigma)
        level = self.result.noise_level
        return numpy_step(x, velocity, sigma, following, self.sigmas[1], level)

    def transition_kl(self, step):
        mean, noise_scale, _ = self.transition(self.weights.current, step)
        base_mean, _, _ = self.transition(self.weights.base, step)
        return self.train.beta * mean_square(mean - base_mean) / (2 * noise_scale**2 + 1e-7)

    def opd(self, step):
        mean, _, std = self.transition(self.weights.current, step)
        taught, _, _ = self.transition(self.weights.teacher_x, step)
        return mean_square(mean - taught) / (2 * std**2) + self.transition_kl(step)

    def ratio(self, step):
        """ppo, guard_grpo and flow_dppo."""
        advantages = self.advantages
        sigma, following = self.sigmas[step.index : step.index + 2]
        mean, _, std = self.transition(self.weights.current, step)
        var = std**2
        kl = self.transition_kl(step)
        squares = mean_square(step.next_latents.numpy() - mean)
        log_prob = -squares / (2 * var) - 0.5 * np.log(2 * np.pi * var)
        divergence = mean_square(mean - step.mean.numpy()) / (2 * var)
        exponent = log_prob - step.log_prob.numpy()
        weight = 1.0
        if self.name == "guard_grpo":
            exponent = (exponent + divergence) * std
            weight = 1 / (sigma - following)
        ratio = np.exp(exponent)
        if self.name == "flow_dppo":
            masked = ((ratio - 1) * advantages > 0) & (divergence >= self.train.dppo_divergence)
            return np.where(masked, 0, -advantages * ratio) + kl
        clipped = np.clip(ratio, 1 - self.train.clip_range, 1 + self.train.clip_range)
        return weight * np.maximum(-advantages * ratio, -advantages * clipped) + kl


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_range", [0.002, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_against_numpy(name, clip_range, beta):
    policy = ToyPolicy(dtype=torch.float64)
    limits = {
        "clip_range": clip_range,
        "awm_clip_range": clip_range / 2,
        "dppo_divergence": clip_range / 100,
        "dgpo_reference": "slow" if clip_range > 1 else "base",
    }
    result = sample(policy)
    train = train_options(beta=beta, **limits)
    losses, metrics = evaluate(name, result, policy, train)
    expected = NumpyLoss(name, policy, result, train).losses()
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert all(value.shape == losses.shape for value in metrics.values())
    assert ("kl" in metrics) == (beta != 0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
# The others are compared with the joint loss of a group instead.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dgpo", "dpo", "crd")])
def test_gradient_matches_finite_differences(name, beta, monkeypatch):
    """In float64; the weights of nft's normalizers are constants of its gradient, so the
    differences hold them fixed.
    """
    policy = ToyPolicy(dtype=torch.float64)
    result = sample(policy)
    train = train_options(clip_range=10.0, beta=beta)

    def value(parameters):
        policy.transformer._parameters["current"] = parameters
        return evaluate(name, result, policy, train)[0].sum()

    start = policy.transformer.current
    if name == "nft":  # record the normalizers at the start, then replay them
        normalizers = []
        clamp_min = torch.Tensor.clamp_min

        def record(x, least):
            normalizers.append(clamp_min(x, least))
            return normalizers[-1]

        monkeypatch.setattr(torch.Tensor, "clamp_min", record)
        value(start)
        replay = itertools.cycle(normalizers)
        monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least: next(replay))
    assert torch.autograd.gradcheck(value, start, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["dpo", "crd"])
def test_gradient_is_that_of_the_joint_loss(name):
    """By central differences in NumPy; crd's normalizers are constants of the gradient."""
    policy = ToyPolicy(dtype=torch.float64)
    result = sample(policy)
    train = train_options()
    losses = NumpyLoss(name, policy, result, train)
    start = policy.transformer.current.detach().clone()
    pairs = [(5 << 32) + int(item) for item in result.item_ids]

    def joint_dpo(weights, index):
        change = losses.error(weights, index, pairs)
        change = change - losses.error(policy.transformer.base, index, pairs)
        z = -train.dpo_beta / 2 * (change[2] - change[0])
        return 2 * np.log1p(np.exp(-z))  # a pair counts as two samples

    def joint_crd(weights, index):
        sigma, noise, x = losses.noised(index, result.seeds.tolist())
        difference = losses.velocity(start, x, sigma) - (noise - losses.clean)
        normalizer = np.abs(difference).mean(axis=(1, 2))
        return losses.joint_crd(weights, index, normalizer).sum()

    joint = {"dpo": joint_dpo, "crd": joint_crd}[name]
    evaluate(name, result, policy, train)[0].sum().backward()
    expected = []
    for shift in 1e-6 * torch.eye(2, dtype=torch.float64):
        rise = sum(joint(start + shift, index) - joint(start - shift, index) for index in (0, 2))
        expected.append(rise / 2e-6)
    np.testing.assert_allclose(policy.transformer.current.grad.numpy(), expected, rtol=1e-5)


def test_dpo_trains_the_best_and_the_worst_of_each_group():
    keep = get_objective("dpo")(run_options()).keep
    advantages = np.array([0.3, 9.0, 0.1, -0.4, 9.0, 6.0, 0.3])
    mask = keep(advantages, np.array([4, 1, 4, 1, 1, 1, 4]))
    assert mask.tolist() == [True, True, True, True, False, False, False]
    assert not keep(np.array([0.1, 0.1]), np.array([3, 3])).any()


def test_a_process_without_images_of_an_optimizer_step_sets_nothing():
    """The two kept images of a group may both be on another process."""
    samples = [MeasuredSample(4, 7, sign * 1.5, {"change": np.ones(2)}) for sign in (1, -1)]
    set_group_values(get_objective("dpo")(run_options()), [], samples)


def test_each_prompt_set_has_its_teacher():
    datasets = {"y": DatasetOptions("b"), "x": DatasetOptions("a")}
    teachers = {"x": "first", "y": "second"}
    for sharding in (None, "fsdp2"):
        policy = ToyPolicy(dtype=torch.float64)
        result = sample(policy)
        train = train_options(opd_teachers=teachers, sharding=sharding)
        opd = get_objective("opd")(RunOptions(train=train, datasets=datasets))
        assert opd.adapters == {"teacher_y": "second", "teacher_x": "first"}
        step = Step(result, 2, torch.zeros(3), datasets=torch.tensor([1, 0, 1]))
        losses = opd.loss(step, policy).loss.detach().numpy()
        of_numpy = NumpyLoss("opd", policy, result, train)
        expected = of_numpy.opd(step.noise)
        of_numpy.weights.teacher_x = policy.transformer.teacher_y
        expected[1] = of_numpy.opd(step.noise)[1]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        policy.calls.clear()
        only_y = Step(result, 0, torch.zeros(3), datasets=torch.tensor([0, 0, 0]))
        opd.loss(only_y, policy)
        assert len(policy.calls) == (3 if sharding else 2)


@pytest.mark.parametrize("name", ["ppo", "guard_grpo", "flow_dppo", "awm"])
def test_on_policy_ratio_is_one_and_the_gradient_is_not_clipped(name):
    policy = ToyPolicy()
    narrow = {
        "clip_range": 1e-4,
        "awm_clip_range": 1e-4,
        "dppo_divergence": 1e-12,
        "gradient_step_per_epoch": 1,
    }
    losses, metrics = evaluate(name, sample(policy, moved=False), policy, train_options(**narrow))
    assert (metrics["ratio_mean"] == 1).all()
    for key in metrics.keys() & {"ratio_deviation", "clip_share", "beyond_share"}:
        assert not metrics[key].any()
    losses.sum().backward()
    assert policy.transformer.current.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("name", "option", "limit"), [("ppo", "clip_range", 0.002), ("awm", "awm_clip_range", 0.025)]
)
def test_ratio_metrics(name, option, limit):
    """On both sides of the range, and inside it."""
    policy = ToyPolicy()
    train = train_options(**{option: limit})
    _, metrics = evaluate(name, sample(policy), policy, train, (1.0, 1.0, 1.0))
    ratio = metrics["ratio_mean"].detach()
    assert ratio.min() < 1 - limit and ratio.max() > 1 + limit
    assert torch.equal(metrics["clip_share"], ((ratio - 1).abs() > limit).float())
    assert 0 < metrics["clip_share"].mean() < 1
    if name == "ppo":
        torch.testing.assert_close(metrics["approx_kl"], 0.5 * ratio.log().square())
    torch.testing.assert_close(metrics["ratio_deviation"], (ratio - 1).abs())


@pytest.mark.parametrize(
    ("name", "changes", "option"),
    [
        ("ppo", {"sample.noise_steps": ()}, "sample.noise_steps"),
        ("guard_grpo", {"sample.transition": "cps"}, "sample.transition"),
        ("nft", {"sample.noise_level": 0.0}, "train.timesteps"),
        ("awm", {"sample.num_steps": 7}, "train.num_sigmas"),
        ("dpo", {"use_lora": False}, "use_lora"),
        ("crd", {"sample.num_images_per_prompt": 1}, "train.loss_type"),
        ("opd", {"train.opd_teachers.b": "b"}, "train.opd_teachers has 2"),
        ("opd", {"datasets.b.folder": "b"}, "train.opd_teachers names a"),
    ],
)
def test_an_objective_checks_its_options(name, changes, option):
    overrides = [("train.opd_teachers.a", "a"), ("train.loss_type", name)]
    assert list(get_objective(name).check(load_named("t2is", *overrides))) == []
    overrides += [(key, str(value)) for key, value in changes.items()]
    (problem,) = get_objective(name).check(load_named("t2is", *overrides))
    assert problem.startswith(option)


@pytest.mark.parametrize(
    ("decay_type", "expected", "limit"),
    [(0, 0.0, 0.0), (1, 0.1, 0.5), (2, 0.1875, 0.999)],
)
def test_decay_of_the_old_policy(decay_type, expected, limit):
    (snapshot,) = get_objective("nft")(run_options(decay_type=decay_type)).snapshots
    assert snapshot.decay(0) == 0
    assert snapshot.decay(100) == pytest.approx(expected)
    assert snapshot.decay(10**6) == limit


# --- which steps get noise


def noise_steps(epoch, seed=0, **sample):
    options = RunOptions(seed=seed, sample=SampleOptions(**sample))
    return get_objective("ppo")(options).noise_steps(epoch)


@given(
    st.sets(st.integers(0, 30), min_size=1), st.integers(0, 2**40), st.integers(0, 1000), st.data()
)
def test_drawn_noise_steps_are_candidates_and_reproducible(candidates, seed, epoch, data):
    ascending = sorted(candidates)
    count = data.draw(st.integers(1, len(candidates)))
    drawn = {"noise_steps": ascending, "num_noise_steps": count}
    chosen = noise_steps(epoch, seed, **drawn)
    assert len(chosen) == count == len(set(chosen))
    assert set(chosen) <= candidates and chosen == sorted(chosen)
    assert chosen == noise_steps(epoch, seed, **drawn | {"noise_steps": ascending[::-1]})
    assert noise_steps(epoch, seed, noise_steps=ascending) == ascending
    ten = {"noise_steps": range(10), "num_noise_steps": 2}
    assert len({tuple(noise_steps(epoch + i, seed, **ten)) for i in range(50)}) > 20


def test_a_window_moves_over_the_noise_steps_and_stays_at_their_end():
    window = {"num_noise_steps": 3, "window_epochs": 4, "window_stride": 2}
    steps = [0, 2, 3, 5, 7, 8]
    found = [noise_steps(epoch, noise_steps=steps, **window) for epoch in range(13)]
    expected = [[0, 2, 3], [3, 5, 7], [5, 7, 8], [5, 7, 8]]
    assert found == [expected[epoch // 4] for epoch in range(13)]


class Scaled(Objective):
    def __init__(self, options, scale, shift=0.0):
        super().__init__(options)
        self.scale = scale
        self.shift = shift

    def loss(self, step, policy):
        return LossOutput(step.advantages * self.scale + self.shift)


def scaled(step, policy, options, scale):
    return LossOutput(step.advantages * scale * options.train.nft_beta)


def test_arguments_of_a_users_objective():
    def create(name="Scaled", **arguments):
        own = f"{__name__}:{name}"
        return create_objective(run_options(loss_type=own, loss_kwargs=arguments))

    step = Step(sample(ToyPolicy()), 0, torch.tensor(ADVANTAGES))
    loss = create(scale=2.0, shift=1.0).loss(step, ToyPolicy()).loss
    assert torch.equal(loss, 2 * step.advantages + 1)
    of_function = create("scaled", scale=3.0).loss(step, ToyPolicy()).loss
    assert torch.equal(of_function, step.advantages * 3 * 0.7)
    with pytest.raises(ValueError, match="^config.train.loss_kwargs.*'shfit'"):
        create(scale=2.0, shfit=1.0)
