"""What training requires of each policy: merged sampling, nft without guidance, exact short cuts."""

from types import MethodType

import pytest
import torch
from tiny_policies import NAMES, disturb, items, load, trainable_parameters

from paco_grpo.objectives import Step, get_objective
from paco_grpo.options import TrainOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import unwrap
from paco_grpo.sampling.denoise import Sampling, rollout, transition_at

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
def test_merged_sampling(policy, name):
    base = {n: p.clone() for n, p in unwrap(policy.transformer).named_parameters()}
    plain, fast = (sample(policy, name, num_steps=4, noise_steps=(1, 2), merge_lora=merge) for merge in (False, True))
    torch.testing.assert_close(fast.clean_latents, plain.clean_latents, rtol=0, atol=1e-4)
    assert not torch.equal(fast.clean_latents, plain.clean_latents), "a merged product rounds elsewhere"
    for n, parameter in unwrap(policy.transformer).named_parameters():
        assert torch.equal(parameter, base[n]), n


@pytest.mark.parametrize("name", ["qwen_image_edit"])
def test_nft_trains_the_conditional_velocity(policy, name):
    lora.add_snapshot(policy, "old")
    disturb(policy, seed=3, scale=0.05)
    step, losses = Step(sample(policy, name, noise_steps=(1,)), 1, torch.tensor([1.0, -0.7, 0.3])), []
    for scale in (4.0, 2.0):
        policy.guidance_scale = scale
        losses.append(get_objective("nft")(step, policy, TrainOptions(nft_beta=0.7)).loss.detach())
    assert torch.equal(*losses)


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


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_what_a_rollout_keeps_of_an_adapter_is_not_trained_on(policy, name):
    """Its weights are cast to bfloat16 once for all steps, without gradients."""
    rolled_out = sample(policy, name, num_steps=4, noise_steps=(1,))
    (step,) = rolled_out.noise_steps
    trained = transition_at(policy, rolled_out, step.latents, step.index).log_prob(step.next_latents)
    assert trained.requires_grad and torch.equal(trained.detach(), step.log_prob)
