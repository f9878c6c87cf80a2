"""What training requires of each policy: merged sampling, nft without guidance, one cast of the adapter."""

import pytest
import torch
from tiny_policies import NAMES, disturb, items, load

from paco_grpo.objectives import Step, get_objective
from paco_grpo.options import TrainOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import unwrap
from paco_grpo.sampling.denoise import Sampling, rollout, transition_at

PROMPTS = ("make the star blue", "b", "a circle in place of the star")
ARGUMENTS = {"num_steps": 3, "noise_steps": (0, 1), "noise_level": 0.7}


BY_NAME = pytest.mark.parametrize("name", NAMES)


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


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_what_a_rollout_keeps_of_an_adapter_is_not_trained_on(policy, name):
    """Its weights are cast to bfloat16 once for all steps, without gradients."""
    rolled_out = sample(policy, name, num_steps=4, noise_steps=(1,))
    (step,) = rolled_out.noise_steps
    trained = transition_at(policy, rolled_out, step.latents, step.index).log_prob(step.next_latents)
    assert trained.requires_grad and torch.equal(trained.detach(), step.log_prob)
