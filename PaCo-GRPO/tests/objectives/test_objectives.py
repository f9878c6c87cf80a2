"""Every objective: against NumPy in float64, gradients against finite differences, batch mates, number of forwards."""

import dataclasses

import numpy as np
import pytest
import torch
from named import load as load_named
from toy_policy import ToyPolicy

from paco_grpo.objectives import OBJECTIVES, Step, get_objective
from paco_grpo.objectives.nft import old_decay
from paco_grpo.options import TrainOptions
from paco_grpo.sampling.denoise import rollout, step_noise
from paco_grpo.types import Item

NAMES = sorted(OBJECTIVES)
ADVANTAGES = (1.5, -0.5, 5.0)


def train_options(**changes):
    return TrainOptions(**{"clip_range": 0.05, "nft_beta": 0.7} | changes)


def sample(policy, noise_steps=(0, 2), cps=False, moved=True):
    """A toy rollout; the weights then move a little, so that ratios differ from 1."""
    conditioning = policy.encode([Item(i, str(i)) for i in range(3)])
    steps = {"num_steps": 4, "noise_steps": noise_steps, "noise_level": 0.8, "cps": cps}
    result = rollout(policy, conditioning, range(3), [21, 22, 23], 8, 12, **steps)
    policy.calls.clear()
    if moved:
        with torch.no_grad():
            policy.transformer.current.add_(torch.tensor([0.02, -0.05]))
    return result


def evaluate(name, result, policy, train, advantages=ADVANTAGES):
    """Losses (B, steps) and metrics (B, steps) over the objective's own steps."""
    objective = get_objective(name)
    values = torch.tensor(advantages[: len(result)], dtype=result.clean_latents.dtype)
    indices = objective.steps(train, result, np.random.default_rng(0))
    terms = [objective(Step(result, index, values), policy, train) for index in indices]
    metrics = {key: torch.stack([t.metrics[key] for t in terms], dim=1) for key in terms[0].metrics}
    return torch.stack([t.loss for t in terms], dim=1), metrics


def numpy_loss(name, policy, result, train):
    """docs/method.md §6 per sample and step in float64, with transitions recomputed from plain velocities."""

    def velocity(parameters, x, sigma, b):
        p = parameters.detach().double().numpy()
        return p[0] * x + p[1] * sigma * result.conditioning.direction[b].double().numpy()

    def nft(step, b, advantage):
        t, clean = float(result.sigmas[step.index]), result.clean_latents[b].double().numpy()
        eps = (
            step_noise([int(result.seeds[b])], (1 << 20) + step.index, result.clean_latents[b : b + 1])[0]
            .double()
            .numpy()
        )
        x = (1 - t) * clean + t * eps
        v, old = velocity(policy.transformer.current, x, t, b), velocity(policy.old_parameters, x, t, b)
        r = np.clip(advantage / train.adv_clip_max / 2 + 0.5, 0, 1)
        total = 0.0
        for share, mixed in (
            (r, train.nft_beta * v + (1 - train.nft_beta) * old),
            (1 - r, (1 + train.nft_beta) * old - train.nft_beta * v),
        ):
            error = x - t * mixed - clean
            total += share * np.mean(error**2) / max(np.mean(np.abs(error)), 1e-5)
        kl = np.mean((v - velocity(policy.base, x, t, b)) ** 2)
        return train.adv_clip_max / train.nft_beta * total + train.beta * kl

    def ratio_loss(step, b, advantage):
        sigma, following = float(result.sigmas[step.index]), float(result.sigmas[step.index + 1])
        x, after = step.latents[b].double().numpy(), step.next_latents[b].double().numpy()
        s = result.noise_level * np.sqrt(sigma / (1 - (float(result.sigmas[1]) if sigma == 1 else sigma)))
        dt = following - sigma

        def mean_of(parameters):
            v = velocity(parameters, x, sigma, b)
            return x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt

        mean, var, scale = mean_of(policy.transformer.current), s**2 * -dt, 1.0
        log_prob = np.mean(-((after - mean) ** 2) / (2 * var) - 0.5 * np.log(2 * np.pi * var))
        exponent = log_prob - float(step.log_prob[b])
        if name == "guard_grpo":
            d = np.sqrt(-dt) * s
            exponent = (exponent + np.mean((mean - step.mean[b].double().numpy()) ** 2) / (2 * d**2)) * d
            scale = 1 / -dt
        ratio = np.exp(exponent)
        clipped = np.clip(ratio, 1 - train.clip_range, 1 + train.clip_range)
        kl = np.mean((mean - mean_of(policy.base)) ** 2) / (2 * s**2 + 1e-7)
        return scale * max(-advantage * ratio, -advantage * clipped) + train.beta * kl

    term = nft if name == "nft" else ratio_loss
    return np.array([[term(step, b, a) for step in result.noise_steps] for b, a in enumerate(ADVANTAGES)])


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_range", [0.002, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_against_numpy(name, clip_range, beta):
    policy = ToyPolicy()
    result, train = sample(policy), train_options(clip_range=clip_range, beta=beta)
    losses, metrics = evaluate(name, result, policy, train)
    np.testing.assert_allclose(losses.detach().numpy(), numpy_loss(name, policy, result, train), rtol=2e-4, atol=2e-4)
    assert all(value.shape == losses.shape and torch.isfinite(value).all() for value in metrics.values())
    assert ("kl" in metrics) == (beta != 0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_matches_finite_differences(name, beta, monkeypatch):
    """In float64; the weights of nft's normalizers are constants of its gradient, so the differences hold them fixed."""
    policy = ToyPolicy(dtype=torch.float64)
    result, train = sample(policy), train_options(clip_range=10.0, beta=beta)

    def value(parameters):
        with torch.no_grad():
            policy.transformer.current.copy_(parameters)
        return evaluate(name, result, policy, train)[0].sum()

    start, scales = policy.transformer.current.detach().clone(), []
    original = torch.Tensor.clamp_min
    if name == "nft":  # record the normalizers at the start, then replay them
        monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least: scales.append(original(x, least)) or scales[-1])
    value(start).backward()
    analytic = policy.transformer.current.grad.clone()
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-6
        sides = []
        for sign in (1, -1):
            replay = iter(scales)
            if name == "nft":
                monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least, replay=replay: next(replay))
            sides.append(value(start + sign * step).item())
        assert analytic[j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_forward_happens_only_with_a_kl_weight(name):
    policy = ToyPolicy()
    result = sample(policy)
    forwards = 2 * (2 if name == "nft" else 1)  # two steps; nft also evaluates the old policy
    evaluate(name, result, policy, train_options(beta=0.0))
    assert policy.calls == [3] * forwards
    policy.calls.clear()
    evaluate(name, result, policy, train_options(beta=0.1))
    assert policy.calls == [3] * (forwards + 2)


@pytest.mark.parametrize("name", ["ppo", "guard_grpo"])
def test_on_policy_ratio_is_one_and_the_gradient_is_not_clipped(name):
    policy = ToyPolicy()
    losses, metrics = evaluate(name, sample(policy, moved=False), policy, train_options(clip_range=1e-4))
    assert (
        (metrics["ratio_mean"] == 1).all() and not metrics["ratio_deviation"].any() and not metrics["clip_share"].any()
    )
    losses.sum().backward()
    assert policy.transformer.current.grad.abs().min() > 0


def test_ratio_metrics():
    policy = ToyPolicy()
    result = sample(policy)
    ratio = evaluate("ppo", result, policy, train_options())[1]["ratio_mean"].detach()
    clip_range = float((ratio - 1).abs().median())
    losses, metrics = evaluate("ppo", result, policy, train_options(clip_range=clip_range), (1.0, 1.0, 1.0))
    assert torch.equal(metrics["clip_share"], ((ratio - 1).abs() > clip_range).float())
    torch.testing.assert_close(metrics["approx_kl"], 0.5 * ratio.log().square())
    torch.testing.assert_close(metrics["ratio_deviation"], (ratio - 1).abs())
    torch.testing.assert_close(losses, -torch.minimum(ratio, ratio.clamp(1 - clip_range, 1 + clip_range)))


def test_trained_steps():
    result, rng = sample(ToyPolicy()), np.random.default_rng(0)
    plain = sample(ToyPolicy(), noise_steps=())
    for name in ("ppo", "guard_grpo"):
        assert list(get_objective(name).steps(train_options(), result, rng)) == [0, 2]
        assert list(get_objective(name).steps(train_options(timesteps=(2,)), result, rng)) == [2]
    nft = get_objective("nft")
    assert list(nft.steps(train_options(), result, rng)) == [0, 2]
    assert list(nft.steps(train_options(timesteps=(1, 3)), plain, rng)) == [1, 3]  # needs no noise step
    with pytest.raises(KeyError):
        plain.noise_step(1)


def test_a_sigma_outside_the_schedule():
    policy = ToyPolicy()
    result, advantages = sample(policy), torch.tensor(ADVANTAGES)
    step = Step(result, float(result.sigmas[2]), advantages)
    assert torch.equal(step.sigma, Step(result, 2, advantages).sigma)


@pytest.mark.parametrize(
    ("name", "changes", "option"),
    [
        ("ppo", {"sample.noise_steps": ()}, "sample.noise_steps"),
        ("ppo", {"sample.noise_level": 0.0}, "sample.noise_level"),
        ("guard_grpo", {"sample.cps": True}, "sample.cps"),
        ("ppo", {"train.timesteps": (2,)}, "train.timesteps"),
        ("ppo", {"train.timesteps": (1,), "sample.num_noise_steps": 1}, "train.timesteps"),
        ("nft", {"train.timesteps": (10,)}, "train.timesteps"),
        ("nft", {"sample.noise_level": 0.0}, "train.timesteps"),
    ],
)
def test_an_objective_checks_its_options(name, changes, option):
    options = load_named("t2is")
    assert list(get_objective(name).check(options)) == []
    for key, value in changes.items():
        group, _, field = key.partition(".")
        options = dataclasses.replace(
            options, **{group: dataclasses.replace(getattr(options, group), **{field: value})}
        )
    (problem,) = get_objective(name).check(options)
    assert problem.startswith(option)


@pytest.mark.parametrize(("decay_type", "expected"), [(None, 0.1), (0, 0.0), (1, 0.1), (2, 0.1875)])
def test_decay_of_the_old_policy(decay_type, expected):
    train = train_options(decay_type=decay_type)
    assert old_decay(100, train) == pytest.approx(expected)
    assert old_decay(10**6, train) == {None: 0.5, 0: 0.0, 1: 0.5, 2: 0.999}[decay_type]
    assert old_decay(0, train) == 0


@pytest.mark.parametrize("name", ["guard_gpo", "no.such.module:f", "json:nothing", "json:__name__"])
def test_unknown_objectives(name):
    with pytest.raises(ValueError, match="config.train.loss_type"):
        get_objective(name)
