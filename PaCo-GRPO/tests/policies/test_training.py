"""What training requires of each policy: batch independence, merged sampling, work done once. Ratios: test_families.py."""

from types import MethodType

import numpy as np
import pytest
import torch
from tiny_policies import NAMES, disturb, items, load, trainable_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.objectives import OBJECTIVES, Step, get_objective
from paco_grpo.objectives.forward import FRESH
from paco_grpo.options import TrainOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import unwrap
from paco_grpo.sampling.denoise import Sampling, rollout, step_noise, transition_at

PROMPTS = ("make the star blue", "b", "a circle in place of the star")
ARGUMENTS = {"num_steps": 3, "noise_steps": (0, 1), "noise_level": 0.7}


BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def policy(tiny_folder, name, dtype):
    """With a LoRA that changes its velocity."""
    policy = load(name, tiny_folder(name), dtype=dtype)
    lora.add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    return policy


def sample(policy, name, **options):
    conditioning = policy.encode(items(name, *PROMPTS))
    return rollout(policy, conditioning, range(3), range(4, 7), 32, 32, Sampling(**ARGUMENTS | options))


def gradient_of(loss, policy):
    # Qwen-Image's last block computes text features that nothing reads: their weights have no gradient
    found = torch.autograd.grad(loss, trainable_parameters(policy), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


@BY_NAME
@pytest.mark.parametrize("same_latent", [False, True])
def test_merged_sampling_and_a_shared_beginning(policy, name, same_latent):
    base = {n: p.clone() for n, p in unwrap(policy.transformer).named_parameters()}
    options = ARGUMENTS | {"num_steps": 4, "noise_steps": (1, 2)}
    conditioning = policy.encode(items(name, "x", "x", "y")).select([0, 0, 2])
    shared = [4, 4, 6] if same_latent else None
    arguments = (policy, conditioning, [0, 0, 2], [4, 5, 6], 32, 32)
    plain = rollout(*arguments, Sampling(**options), shared)
    forwards = []
    policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    fast = rollout(*arguments, Sampling(merge_lora=True, **options), shared)
    times = 2 if policy.has_true_cfg else 1
    assert forwards == ([2] if same_latent else [3]) * times + [3] * 3 * times
    torch.testing.assert_close(fast.clean_latents, plain.clean_latents, rtol=0, atol=1e-4)
    first = plain.noise_steps[0].latents
    assert torch.equal(first[0], first[1]) == same_latent
    for n, parameter in unwrap(policy.transformer).named_parameters():
        assert torch.equal(parameter, base[n]), n


@pytest.mark.parametrize("name", ["flux"])
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_the_loss_of_a_sample_does_not_depend_on_its_batch(policy, name, loss_type):
    result, advantages = sample(policy, name), torch.tensor([1.0, -0.7, 0.3])
    objective = get_objective(loss_type)
    for each in objective.snapshots:
        lora.add_snapshot(policy, each.name)
    disturb(policy, seed=3, scale=0.02)  # so that ratios are not 1
    train = TrainOptions(clip_range=0.2, beta=0.1, nft_beta=0.7, timesteps=(0, 1))

    def loss_and_gradient(rows):
        part = result.select(rows)
        steps = objective.steps(train, part, np.random.default_rng(0))
        loss = sum(objective(Step(part, index, advantages[rows], advantages[rows] / 2), policy, train).loss.sum() for index in steps)
        return loss.detach(), gradient_of(loss, policy)

    singles = [loss_and_gradient([i]) for i in range(3)]
    for rows in ([0, 1, 2], [2, 0]):
        loss, gradient = loss_and_gradient(rows)
        torch.testing.assert_close(loss, sum(singles[i][0] for i in rows), rtol=1e-4, atol=1e-5)
        expected = sum(singles[i][1] for i in rows)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", ["qwen_image_edit"])
def test_nft_trains_the_conditional_velocity(policy, name):
    lora.add_snapshot(policy, "old")
    disturb(policy, seed=3, scale=0.05)
    result, advantages = sample(policy, name, noise_steps=(1,)), torch.tensor([1.0, -0.7, 0.3])
    loss = get_objective("nft")(Step(result, 1, advantages), policy, TrainOptions(nft_beta=0.7)).loss

    clean, t = result.clean_latents, result.sigmas[1].expand(3)
    noisy = (1 - t[0]) * clean + t[0] * step_noise([4, 5, 6], FRESH + 1, clean)
    arguments = noisy, t, result.conditioning, 32, 32
    with torch.no_grad():
        velocity = policy.velocity(*arguments, guided=False)
        with lora.snapshot(policy, "old"):
            old = policy.velocity(*arguments, guided=False)
    expected = 0.0
    for share, mixed in ((advantages / 10 + 0.5, 0.7 * velocity + 0.3 * old), (0.5 - advantages / 10, 1.7 * old - 0.7 * velocity)):
        error = (noisy - t[0] * mixed - clean).flatten(1)
        expected = expected + 5.0 / 0.7 * share * error.square().mean(1) / error.abs().mean(1)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)


def velocity_and_gradient(policy, name):
    latents, sigma = policy.initial_latents([1, 2, 3], 32, 32), torch.tensor([0.9, 0.5, 0.3])
    velocity = policy.velocity(latents, sigma, policy.encode(items(name, *PROMPTS)), 32, 32)
    return velocity, gradient_of(velocity.square().mean(), policy)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["flux", "flux_kontext"])
@BY_DTYPE
def test_flux_leaves_out_text_that_nothing_reads(policy, name, checkpointing, dtype):
    if checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    last, sizes = policy.transformer.single_transformer_blocks[-1], []
    last.proj_out.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    ours, gradient = velocity_and_gradient(policy, name)
    last.forward = MethodType(type(last).forward, last)
    theirs, expected = velocity_and_gradient(policy, name)
    assert sizes[0] == sizes[-1] - policy.encode(items(name, "x")).prompt_embeds.shape[1]
    low = dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if low else 2e-6)  # a GPU may round otherwise
    torch.testing.assert_close(gradient, expected, **({"rtol": 1e-2, "atol": 1e-2} if low else {"rtol": 1e-4, "atol": 1e-6}))


class Casts(TorchDispatchMode):
    """Addresses of what is cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **kwargs)


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_rollout_casts_an_adapter_once(policy, name):
    weights = {p.data_ptr() for p in trainable_parameters(policy)}
    with Casts() as casts:
        ours = sample(policy, name, num_steps=4, noise_steps=(1,))
    cast = [address for address in casts.addresses if address in weights]
    assert len(cast) == len(set(cast)) > 0
    step = ours.noise_steps[0]
    trained = transition_at(policy, ours, step.latents, step.index).log_prob(step.next_latents)
    assert trained.requires_grad  # the kept casts, which have no gradient, are gone
    assert torch.equal(trained.detach(), step.log_prob)
