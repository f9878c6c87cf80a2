"""Every objective: against NumPy in float64, gradients against finite differences, batch mates,
number of forwards.
"""

import itertools

import numpy as np
import pytest
import torch
from named import load as load_named
from toy_policy import ToyPolicy, numpy_step, sample, set_group_weights

from paco_grpo.objectives import OBJECTIVES, LossOutput, Step, get_objective
from paco_grpo.options import TrainOptions
from paco_grpo.sampling.denoise import step_noise

NAMES = sorted(OBJECTIVES)
ADVANTAGES = (1.5, -0.5, 5.0)


# Trains on the noise steps, with an old policy in awm, without dgpo's mask (in test_forward.py).
FORWARD = {
    "timesteps": (0, 2),
    "gradient_step_per_epoch": 2,
    "dgpo_clip_range": None,
    "dgpo_beta": 3.0,
}


def train_options(**changes):
    return TrainOptions(**{"clip_range": 0.05, "nft_beta": 0.7} | FORWARD | changes)


def evaluate(name, result, policy, train, advantages=ADVANTAGES):
    """Losses (B, steps) and metrics (B, steps) over the objective's own steps."""
    objective = get_objective(name)(train)
    values = torch.tensor(advantages[: len(result)], dtype=result.clean_latents.dtype)
    indices = objective.steps(result, np.random.default_rng(0))
    steps = [Step(result, index, values, epoch_seed=5) for index in indices]
    if name == "dgpo":
        set_group_weights(objective, steps, policy)
    outputs = [objective.loss(step, policy) for step in steps]
    metrics = {
        key: torch.stack([output.metrics[key] for output in outputs], dim=1)
        for key in outputs[0].metrics
    }
    return torch.stack([output.loss for output in outputs], dim=1), metrics


def numpy_loss(name, policy, result, train):
    """docs/method.md §6 per sample and step in float64, with transitions recomputed from plain
    velocities.
    """

    def velocity(parameters, x, sigma, b):
        p = parameters.detach().numpy()
        return p[0] * x + p[1] * sigma * result.conditioning.direction[b].numpy()

    def noised(step, b, seed):
        t, clean = float(result.sigmas[step.index]), result.clean_latents[b].numpy()
        eps = (
            step_noise([seed], (1 << 20) + step.index, result.clean_latents[b : b + 1])[0]
            .double()
            .numpy()
        )
        return t, clean, eps, (1 - t) * clean + t * eps

    def error(parameters, step, b, seed):
        t, clean, eps, x = noised(step, b, seed)
        return np.mean((velocity(parameters, x, t, b) - (eps - clean)) ** 2)

    def distance(parameters, step, b, seed):
        t, _, _, x = noised(step, b, seed)
        return np.mean(
            (velocity(policy.transformer.current, x, t, b) - velocity(parameters, x, t, b)) ** 2
        )

    def awm(step, b, advantage):
        seed, t = int(result.seeds[b]), float(result.sigmas[step.index])

        def likelihood(parameters):
            return -t * 4 * ((error(parameters, step, b, seed) + 1e-10) ** 0.25 - 1e-10**0.25)

        ratio = np.exp(likelihood(policy.transformer.current) - likelihood(policy.transformer.old))
        scaled = advantage / train.adv_clip_max
        clip = np.clip(ratio, 1 - train.awm_clip_range, 1 + train.awm_clip_range)
        return (
            max(-scaled * ratio, -scaled * clip)
            + train.awm_slow_beta * distance(policy.transformer.slow, step, b, seed)
            + train.beta * distance(policy.transformer.base, step, b, seed)
        )

    def dgpo(step, b, advantage):
        current, seeds = (
            policy.transformer.current,
            [(5 << 32) + int(item) for item in result.item_ids],
        )
        members = np.flatnonzero(result.item_ids.numpy() == int(result.item_ids[b]))
        mean = np.mean([ADVANTAGES[i] for i in members])
        changes = [
            error(current, step, i, seeds[i]) - error(policy.transformer.base, step, i, seeds[i])
            for i in members
        ]
        total = train.dgpo_beta * np.mean(
            [(ADVANTAGES[i] - mean) * c for i, c in zip(members, changes, strict=True)]
        )
        kl = distance(policy.transformer.base, step, b, seeds[b])
        return (advantage - mean) / (1 + np.exp(-total)) * error(
            current, step, b, seeds[b]
        ) + train.beta * kl

    def nft(step, b, advantage):
        seed = int(result.seeds[b])
        t, clean, _, x = noised(step, b, seed)
        v, old = (
            velocity(policy.transformer.current, x, t, b),
            velocity(policy.transformer.old, x, t, b),
        )
        r = np.clip(advantage / train.adv_clip_max / 2 + 0.5, 0, 1)
        total = 0.0
        for share, mixed in (
            (r, train.nft_beta * v + (1 - train.nft_beta) * old),
            (1 - r, (1 + train.nft_beta) * old - train.nft_beta * v),
        ):
            error = x - t * mixed - clean
            total += share * np.mean(error**2) / max(np.mean(np.abs(error)), 1e-5)
        return train.adv_clip_max / train.nft_beta * total + train.beta * distance(
            policy.transformer.base, step, b, seed
        )

    def ratio_loss(step, b, advantage):
        sigma, following = float(result.sigmas[step.index]), float(result.sigmas[step.index + 1])
        x, after = step.latents[b].numpy(), step.next_latents[b].numpy()

        def step_of(parameters):
            v = velocity(parameters, x, sigma, b)
            return numpy_step(x, v, sigma, following, float(result.sigmas[1]), result.noise_level)

        (mean, s, std), scale = step_of(policy.transformer.current), 1.0
        var, change = std**2, np.mean((mean - step.mean[b].numpy()) ** 2)
        kl = np.mean((mean - step_of(policy.transformer.base)[0]) ** 2) / (2 * s**2 + 1e-7)
        log_prob = np.mean(-((after - mean) ** 2) / (2 * var) - 0.5 * np.log(2 * np.pi * var))
        exponent = log_prob - float(step.log_prob[b])
        if name == "guard_grpo":
            exponent = (exponent + change / (2 * var)) * std
            scale = 1 / (sigma - following)
        ratio = np.exp(exponent)
        if name == "flow_dppo":
            moved = (ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0)
            masked = moved and change / (2 * var) >= train.dppo_divergence
            return (0 if masked else -advantage * ratio) + train.beta * kl
        clipped = np.clip(ratio, 1 - train.clip_range, 1 + train.clip_range)
        return scale * max(-advantage * ratio, -advantage * clipped) + train.beta * kl

    term = {"nft": nft, "awm": awm, "dgpo": dgpo}.get(name, ratio_loss)
    return np.array(
        [[term(step, b, a) for step in result.noise_steps] for b, a in enumerate(ADVANTAGES)]
    )


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_range", [0.002, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_against_numpy(name, clip_range, beta):
    policy = ToyPolicy(dtype=torch.float64)
    limits = {
        "clip_range": clip_range,
        "awm_clip_range": clip_range,
        "dppo_divergence": clip_range / 100,
    }
    result, train = sample(policy), train_options(beta=beta, **limits)
    losses, metrics = evaluate(name, result, policy, train)
    np.testing.assert_allclose(
        losses.detach().numpy(), numpy_loss(name, policy, result, train), rtol=1e-6, atol=1e-6
    )
    assert all(value.shape == losses.shape for value in metrics.values())
    assert ("kl" in metrics) == (beta != 0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "dgpo"]
)  # compared with its joint loss instead
def test_gradient_matches_finite_differences(name, beta, monkeypatch):
    """In float64; the weights of nft's normalizers are constants of its gradient, so the
    differences hold them fixed.
    """
    policy = ToyPolicy(dtype=torch.float64)
    result, train = sample(policy), train_options(clip_range=10.0, beta=beta)

    def value(parameters):
        policy.transformer._parameters["current"] = parameters
        return evaluate(name, result, policy, train)[0].sum()

    start, scales, original = policy.transformer.current, [], torch.Tensor.clamp_min
    if name == "nft":  # record the normalizers at the start, then replay them
        monkeypatch.setattr(
            torch.Tensor,
            "clamp_min",
            lambda x, least: scales.append(original(x, least)) or scales[-1],
        )
        value(start)
        replay = itertools.cycle(scales)
        monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least: next(replay))
    assert torch.autograd.gradcheck(value, start, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_forward_happens_only_with_a_kl_weight(name):
    policy = ToyPolicy()
    result = sample(policy)
    forwards = 2 * {"nft": 2, "awm": 3, "dgpo": 3}.get(
        name, 1
    )  # two steps; old and slow policies, first pass
    evaluate(name, result, policy, train_options(beta=0.0))
    assert policy.calls == [3] * forwards
    policy.calls.clear()
    evaluate(name, result, policy, train_options(beta=0.1))
    assert policy.calls == [3] * (forwards + 2)


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
    assert not any(
        metrics[key].any()
        for key in ("ratio_deviation", "clip_share", "beyond_share")
        if key in metrics
    )
    losses.sum().backward()
    assert policy.transformer.current.grad.abs().min() > 0


def test_ratio_metrics():
    policy = ToyPolicy()
    _, metrics = evaluate(
        "ppo", sample(policy), policy, train_options(clip_range=0.002), (1.0, 1.0, 1.0)
    )
    ratio = metrics["ratio_mean"]
    assert (
        torch.equal(metrics["clip_share"], ((ratio - 1).abs() > 0.002).float())
        and 0 < metrics["clip_share"].mean() < 1
    )
    torch.testing.assert_close(metrics["approx_kl"], 0.5 * ratio.log().square())
    torch.testing.assert_close(metrics["ratio_deviation"], (ratio - 1).abs())


def test_trained_steps():
    result, rng = sample(ToyPolicy()), np.random.default_rng(0)
    plain = sample(ToyPolicy(), noise_steps=())

    def steps(name, timesteps, rollout):
        objective = get_objective(name)(train_options(timesteps=timesteps))
        return list(objective.steps(rollout, rng))

    for name in ("ppo", "guard_grpo", "flow_dppo", "nft"):
        assert steps(name, None, result) == [0, 2]
        assert steps(name, (2,), result) == [2]
    assert steps("nft", (1, 3), plain) == [1, 3]  # it needs no noise step


@pytest.mark.parametrize(
    ("name", "changes", "option"),
    [
        ("ppo", {"sample.noise_steps": ()}, "sample.noise_steps"),
        ("guard_grpo", {"sample.cps": True}, "sample.cps"),
        ("ppo", {"train.timesteps": (1,), "sample.num_noise_steps": 1}, "train.timesteps"),
        ("nft", {"sample.noise_level": 0.0}, "train.timesteps"),
        ("nft", {"train.num_sigmas": 9}, "train.num_sigmas"),
        ("awm", {"sample.num_steps": 7}, "train.num_sigmas"),
        ("dgpo", {"sample.num_images_per_prompt": 1}, "train.loss_type"),
    ],
)
def test_an_objective_checks_its_options(name, changes, option):
    assert list(get_objective(name).check(load_named("t2is"))) == []
    (problem,) = get_objective(name).check(
        load_named("t2is", *((key, str(value)) for key, value in changes.items()))
    )
    assert problem.startswith(option)


def test_decay_of_the_old_policy():
    for decay_type, expected, limit in (
        (None, 0.1, 0.5),
        (0, 0.0, 0.0),
        (1, 0.1, 0.5),
        (2, 0.1875, 0.999),
    ):
        (snapshot,) = get_objective("nft")(train_options(decay_type=decay_type)).snapshots
        assert snapshot.decay(0) == 0
        assert snapshot.decay(100) == pytest.approx(expected)
        assert snapshot.decay(10**6) == limit


def by_hand(step, policy, train):
    return LossOutput(step.advantages * train.nft_beta)


def test_a_function_is_an_objective():
    objective = get_objective(f"{__name__}:by_hand")(train_options())
    step = Step(sample(ToyPolicy()), 0, torch.tensor(ADVANTAGES))
    loss, metrics = objective.loss(step, ToyPolicy())
    assert torch.equal(loss, 0.7 * step.advantages)
    assert not metrics
    assert objective.snapshots == ()


def test_unknown_objectives():
    for name in ("guard_gpo", "no.such.module:f", "json:nothing"):
        with pytest.raises(ValueError, match="config.train.loss_type"):
            get_objective(name)
