"""Every objective: against NumPy in float64, gradients against finite differences, batch mates, costs."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_policy import ToyPolicy

from paco_grpo.objectives import OBJECTIVES, get_objective
from paco_grpo.policies import load_policy
from paco_grpo.policies.adapters import add_lora, add_old_adapter, trainable_parameters
from paco_grpo.sampling.rollout import _sigma_at, rollout, step_noise
from paco_grpo.sampling.sde import cps_step, sde_step
from paco_grpo.types import Item

NAMES = sorted(OBJECTIVES)


def config(**train):
    options = {"clip_range": 0.05, "adv_clip_max": 5.0, "beta": 0.0, "nft_beta": 0.7, "timesteps": None} | train
    return SimpleNamespace(train=SimpleNamespace(**options))


def record_of(policy, advantages=(1.5, -0.5, 7.0), noise_steps=(0, 2), cps=False, moved=True):
    """A toy rollout; the weights then move a little, so that ratios differ from 1."""
    conditioning = policy.encode([Item(i, str(i)) for i in range(3)])
    record = rollout(
        policy,
        conditioning,
        range(3),
        [21, 22, 23],
        8,
        12,
        num_steps=4,
        noise_steps=noise_steps,
        noise_level=0.8,
        cps=cps,
    )
    policy.calls.clear()
    if moved:
        with torch.no_grad():
            policy.transformer.current.add_(torch.tensor([0.02, -0.05]))
    dtype = record.clean_latents.dtype
    return dataclasses.replace(
        record, advantages=torch.tensor(advantages, dtype=dtype), weights=torch.ones(3, dtype=dtype)
    )


def numpy_loss(name, policy, record, train):
    """docs/method.md §6 for each sample in float64, with transitions recomputed from plain velocities."""

    def velocity(parameters, x, sigma, b):
        p = parameters.detach().double().numpy()
        return p[0] * x + p[1] * sigma * record.conditioning.direction[b].double().numpy()

    def transition(parameters, position, b):
        i = int(record.step_index[position])
        sigma, following = float(record.sigmas[i]), float(record.sigmas[i + 1])
        x = record.latents[b, position].double().numpy()
        v = velocity(parameters, x, sigma, b)
        s = record.noise_level * np.sqrt(sigma / (1 - (float(record.sigmas[1]) if sigma == 1 else sigma)))
        dt = following - sigma
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, s, dt

    losses = []
    for b in range(len(record)):
        advantage = np.clip(float(record.advantages[b]), -train.adv_clip_max, train.adv_clip_max)
        values = []
        for position in range(len(record.step_index)):
            if name == "nft":
                i = int(record.step_index[position])
                t = float(record.sigmas[i])
                clean = record.clean_latents[b].double().numpy()
                eps = (
                    step_noise([int(record.seeds[b])], (1 << 20) + i, record.clean_latents[b : b + 1])[0]
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
                values.append(train.adv_clip_max / train.nft_beta * total + train.beta * kl)
                continue
            mean, s, dt = transition(policy.transformer.current, position, b)
            after = record.next_latents[b, position].double().numpy()
            var = s**2 * -dt
            log_prob = np.mean(-((after - mean) ** 2) / (2 * var) - 0.5 * np.log(2 * np.pi * var))
            exponent = log_prob - float(record.log_prob[b, position])
            scale = 1.0
            if name == "guard_grpo":
                d = np.sqrt(-dt) * s
                old_mean = record.step_mean[b, position].double().numpy()
                exponent = (exponent + np.mean((mean - old_mean) ** 2) / (2 * d**2)) * d
                scale = 1 / -dt
            ratio = np.exp(exponent)
            clipped = np.clip(ratio, 1 - train.clip_range, 1 + train.clip_range)
            reference = transition(policy.base, position, b)[0]
            kl = np.mean((mean - reference) ** 2) / (2 * s**2 + 1e-7)
            values.append(scale * max(-advantage * ratio, -advantage * clipped) + train.beta * kl)
        losses.append(np.mean(values))
    return np.array(losses)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_range", [0.002, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_against_numpy(name, clip_range, beta):
    policy = ToyPolicy()
    record = record_of(policy)
    settings = config(clip_range=clip_range, beta=beta)
    loss, metrics = get_objective(name)(record, policy, settings)
    by_hand = numpy_loss(name, policy, record, settings.train)
    assert loss.item() == pytest.approx(by_hand.sum(), rel=2e-4, abs=2e-4)
    assert all(value.ndim == 0 and not value.requires_grad and torch.isfinite(value) for value in metrics.values())
    assert ("kl" in metrics) == (beta != 0)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_matches_finite_differences(name, beta):
    """In float64; the weights of nft's normalisers are held constant, so there the differences hold them too."""
    policy = ToyPolicy(dtype=torch.float64)
    record = record_of(policy)
    objective, settings = get_objective(name), config(clip_range=10.0, beta=beta)

    def value(parameters):
        with torch.no_grad():
            policy.transformer.current.copy_(parameters)
        return objective(record, policy, settings)[0]

    start = policy.transformer.current.detach().clone()
    value(start).backward()
    analytic = policy.transformer.current.grad.clone()
    if name == "nft":
        assert_nft_gradient(policy, record, settings, start, analytic)
        return
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-6
        numeric = (value(start + step) - value(start - step)).item() / 2e-6
        assert analytic[j].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def assert_nft_gradient(policy, record, settings, start, analytic):
    train = settings.train

    def frozen(parameters, scales=None):
        """The loss with given stop-gradient scales (or its own, returned)."""
        total, used = 0.0, []
        for i in record.step_index.tolist():
            t, clean = record.sigmas[i], record.clean_latents
            x = (1 - t) * clean + t * step_noise(record.seeds, (1 << 20) + i, clean)
            v, old, base = (
                p[0] * x + p[1] * t * record.conditioning.direction
                for p in (parameters, policy.old_parameters, policy.base)
            )
            r = (record.advantages.clamp(-5, 5) / 10 + 0.5).clamp(0, 1)
            for share, mixed in (
                (r, train.nft_beta * v + (1 - train.nft_beta) * old),
                (1 - r, (1 + train.nft_beta) * old - train.nft_beta * v),
            ):
                error = (x - t * mixed - clean).flatten(1)
                used.append(error.abs().mean(1))
                scale = used[-1] if scales is None else scales[len(used) - 1]
                total = total + (share * error.square().mean(1) / scale).sum() * 5 / train.nft_beta / 2
            total = total + train.beta * (v - base).square().flatten(1).mean(1).sum() / 2
        return total.item(), used

    _, scales = frozen(start)
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-6
        numeric = (frozen(start + step, scales)[0] - frozen(start - step, scales)[0]) / 2e-6
        assert analytic[j].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_samples_loss_does_not_depend_on_its_batch(name):
    policy = ToyPolicy()
    record = record_of(policy)
    objective, settings = get_objective(name), config(beta=0.3)
    together = objective(record, policy, settings)[0].item()
    apart = [objective(record.select([b]), policy, settings)[0].item() for b in range(3)]
    assert together == pytest.approx(sum(apart), rel=1e-5)
    steps = [objective(record.select_steps([j]), policy, settings)[0].item() for j in range(2)]
    assert together == pytest.approx(sum(steps) / 2, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_left_out_sample_has_no_part(name):
    policy = ToyPolicy()
    record = record_of(policy)
    objective, settings = get_objective(name), config(beta=0.3)
    left_out = dataclasses.replace(
        record, advantages=torch.tensor([1.5, float("nan"), 7.0]), weights=torch.tensor([1.0, 0, 1])
    )
    loss, metrics = objective(left_out, policy, settings)
    rest, rest_metrics = objective(record.select([0, 2]), policy, settings)
    torch.testing.assert_close(loss, rest)
    for key in metrics:
        torch.testing.assert_close(metrics[key], rest_metrics[key], rtol=1e-5, atol=1e-7)
    nobody, metrics = objective(dataclasses.replace(record, weights=torch.zeros(3)), policy, settings)
    nobody.backward()
    assert nobody.item() == 0 and policy.transformer.current.grad.abs().sum() == 0
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_forward_happens_only_with_a_kl_weight(name):
    policy = ToyPolicy()
    record = record_of(policy)
    forwards = 2 * (2 if name == "nft" else 1)  # two steps; nft also asks the old policy
    get_objective(name)(record, policy, config(beta=0.0))
    assert policy.calls == [3] * forwards
    policy.calls.clear()
    get_objective(name)(record, policy, config(beta=0.1))
    assert policy.calls == [3] * (forwards + 2)


@pytest.mark.parametrize("name", ["ppo", "guard_grpo"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_not_clipped(name):
    policy = ToyPolicy()
    record = record_of(policy, moved=False)
    loss, metrics = get_objective(name)(record, policy, config(clip_range=1e-4))
    assert metrics["ratio_mean"] == 1 and metrics["ratio_deviation"] == 0 and metrics["clip_share"] == 0
    loss.backward()
    assert policy.transformer.current.grad.abs().min() > 0


def test_ppo_clips_and_says_so():
    policy = ToyPolicy()
    record = record_of(policy, advantages=(1.0, 1.0, 1.0))
    ratios = []
    for j in range(2):
        sigma, following = _sigma_at(record.sigmas, int(record.step_index[j]), record.latents[:, j])
        velocity = policy.velocity(record.latents[:, j], sigma, record.conditioning, 8, 12)
        step = sde_step(record.latents[:, j], velocity, sigma, following, float(record.sigmas[1]), 0.8)
        ratios.append((step.log_prob(record.next_latents[:, j]) - record.log_prob[:, j]).exp())
    ratio = torch.cat(ratios).detach()
    clip_range = float((ratio - 1).abs().median())
    loss, metrics = get_objective("ppo")(record, policy, config(clip_range=clip_range))
    assert metrics["clip_share"].item() == pytest.approx(((ratio - 1).abs() > clip_range).float().mean().item())
    expected = torch.minimum(ratio, ratio.clamp(1 - clip_range, 1 + clip_range)).sum() / 2
    assert loss.item() == pytest.approx(-expected.item(), rel=1e-5)


def test_options_do_something():
    policy = ToyPolicy()
    record = record_of(policy)
    ppo, nft = get_objective("ppo"), get_objective("nft")
    assert ppo(record, policy, config(adv_clip_max=5.0))[0] != ppo(record, policy, config(adv_clip_max=1.0))[0]
    assert nft(record, policy, config(nft_beta=0.7))[0] != nft(record, policy, config(nft_beta=0.2))[0]
    assert nft(record, policy, config(timesteps=(1,)))[0] != nft(record, policy, config())[0]
    # a deterministic rollout is enough for nft
    plain = dataclasses.replace(record_of(ToyPolicy(), noise_steps=()))
    assert torch.isfinite(nft(plain, policy, config(timesteps=(0, 1)))[0])


def test_flow_cps_record_uses_the_cps_step():
    policy = ToyPolicy()
    record = record_of(policy, cps=True, moved=False)
    sigma, following = _sigma_at(record.sigmas, 0, record.latents[:, 0])
    velocity = policy.velocity(record.latents[:, 0], sigma, record.conditioning, 8, 12)
    step = cps_step(record.latents[:, 0], velocity, sigma, following, 0.0, 0.8)
    torch.testing.assert_close(step.mean, record.step_mean[:, 0])
    assert get_objective("ppo")(record, policy, config())[1]["ratio_mean"] == 1
    with pytest.raises(ValueError, match="sample.cps = False"):
        get_objective("guard_grpo")(record, policy, config())


def test_errors():
    policy = ToyPolicy()
    record = record_of(policy)
    for name in ("ppo", "guard_grpo"):
        with pytest.raises(ValueError, match="no noise step"):
            get_objective(name)(record_of(ToyPolicy(), noise_steps=()), policy, config())
    for name in NAMES:
        with pytest.raises(ValueError, match="no advantages"):
            get_objective(name)(dataclasses.replace(record, advantages=None), policy, config())
    with pytest.raises(ValueError, match="trained step"):
        get_objective("nft")(dataclasses.replace(record, seeds=None), policy, config())
    with pytest.raises(ValueError, match="did you mean 'guard_grpo'"):
        get_objective("guard_gpo")


@pytest.mark.parametrize("name", NAMES)
def test_on_flux(tiny_flux_dir, name):
    policy = load_policy(tiny_flux_dir, max_sequence_length=16)
    add_lora(policy, rank=2, alpha=4)
    add_old_adapter(policy)
    conditioning = policy.encode([Item(i, f"prompt {i}") for i in range(2)])
    record = rollout(policy, conditioning, range(2), [1, 2], 16, 16, num_steps=3, noise_steps=(1,), noise_level=0.7)
    record = dataclasses.replace(record, advantages=torch.tensor([1.0, -1.0]), weights=torch.ones(2))
    loss, metrics = get_objective(name)(record, policy, config(beta=0.1, clip_range=1e-4))
    if name != "nft":
        assert metrics["ratio_mean"] == 1
        assert metrics["kl"] == 0  # a new adapter is the base model
    loss.backward()
    gradients = [p.grad for p in trainable_parameters(policy)]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert sum(g.abs().sum() for g in gradients) > 0
