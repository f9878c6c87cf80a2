"""What training requires of each policy: merged sampling, nft without guidance, one cast of the
adapter.
"""

import pytest
import torch
from tiny_policies import NAMES, disturb, sampled, trained

from paco_grpo.objectives import Step, get_objective
from paco_grpo.options import RunOptions, TrainOptions
from paco_grpo.policies import lora
from paco_grpo.sampling.denoise import transition

PROMPTS = ("make the star blue", "b", "a circle in place of the star")
BY_NAME = pytest.mark.parametrize("name", NAMES)


def sample(policy, name, noise_steps, **options):
    noise = {"noise_steps": noise_steps, "noise_level": 0.7}
    return sampled(policy, name, *PROMPTS, num_steps=4, **noise, **options)


@BY_NAME
def test_merged_sampling(tiny_folder, name):
    policy = trained(name, tiny_folder(name))
    base = {n: p.clone() for n, p in policy.transformer.named_parameters()}
    plain, fast = (sample(policy, name, (1, 2), merge_lora=merge) for merge in (False, True))
    torch.testing.assert_close(fast.clean_latents, plain.clean_latents, rtol=0, atol=1e-4)
    assert not torch.equal(fast.clean_latents, plain.clean_latents), (
        "a merged product rounds elsewhere"
    )
    for n, parameter in policy.transformer.named_parameters():
        assert torch.equal(parameter, base[n]), n


def test_nft_trains_the_conditional_velocity(tiny_folder):
    name = "qwen_image_edit"
    policy = trained(name, tiny_folder(name))
    lora.add_snapshot(policy, "old")
    disturb(policy, seed=3, scale=0.05)
    step = Step(sample(policy, name, (1,)), 1, torch.tensor([1.0, -0.7, 0.3]))
    options = RunOptions(train=TrainOptions(nft_beta=0.7))
    losses = []
    for scale in (4.0, 2.0):
        policy.guidance_scale = scale
        losses.append(get_objective("nft")(options).loss(step, policy).loss.detach())
    assert torch.equal(*losses)


@BY_NAME
def test_what_a_rollout_keeps_of_an_adapter_is_not_trained_on(tiny_folder, name):
    """Its weights are cast to bfloat16 once for all steps, without gradients."""
    policy = trained(name, tiny_folder(name), dtype=torch.bfloat16)
    rolled_out = sample(policy, name, (1,))
    (step,) = rolled_out.noise_steps
    current = transition(policy, rolled_out, step.latents, step.index)
    log_prob = current.log_prob(step.next_latents)
    assert log_prob.requires_grad and torch.equal(log_prob.detach(), step.log_prob)
