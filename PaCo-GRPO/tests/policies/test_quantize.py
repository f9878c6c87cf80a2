"""Transformers with a quantized base."""

import pytest
import torch
from tiny_policies import NAMES, disturb, load, trainable_parameters, velocity_of
from tiny_run import rows_of, tiny_options, train

from paco_grpo.policies.adapters import add_lora, save_diffusers
from paco_grpo.policies.memory import quantizable

BY_NAME = pytest.mark.parametrize("name", NAMES)
PROMPTS = ("a red fox", "two blue hats")


def quantized_weights(policy):
    named = policy.transformer.named_modules()
    return {
        name: layer.weight.detach().clone()
        for name, layer in named
        if type(layer).__module__.startswith("bitsandbytes")
    }


@BY_NAME
def test_velocity_is_near_that_of_the_whole_base_and_gradients_reach_the_lora(name, tiny_folder):
    whole, small = (
        load(name, tiny_folder(name), **options) for options in ({}, {"quantize": "nf4"})
    )
    layers = dict(quantizable(whole.transformer))
    assert set(quantized_weights(small)) == set(layers) and len(layers) > 10
    with torch.no_grad():
        exact = velocity_of(whole, name, *PROMPTS)
        error = float((velocity_of(small, name, *PROMPTS) - exact).norm() / exact.norm())
    assert 0 < error < 0.35
    add_lora(small, rank=4, alpha=8)
    disturb(small)
    before = quantized_weights(small)
    velocity_of(small, name, *PROMPTS).square().sum().backward()
    parameters = trainable_parameters(small)
    gradients = [
        p.grad for p in parameters if p.grad is not None
    ]  # Qwen's last text layers lead nowhere
    assert sum(bool(g.abs().sum() > 0) for g in gradients) > 0.8 * len(parameters)
    for key, weight in quantized_weights(small).items():
        assert torch.equal(weight, before[key])


def test_a_run_starts_at_ratio_one_and_its_lora_fits_the_whole_base(tiny_flux_dir, tmp_path):
    options = tiny_options(
        tiny_flux_dir,
        tmp_path,
        pretrained__quantize="nf4",
        num_epochs=1,
        train__batch_size=4,
        train__old_log_prob="rollout",
    )
    policy = train(options).run.state.policy
    (row,) = rows_of(options, "train")
    assert row["train/ratio_deviation"] < 1e-5
    assert row["train/grad_norm"] > 0
    save_diffusers(policy, tmp_path / "lora")
    again = load("flux", tiny_flux_dir)
    add_lora(again, lora_path=tmp_path / "lora")
    for ours, theirs in zip(trainable_parameters(policy), trainable_parameters(again), strict=True):
        assert torch.equal(theirs, ours) or torch.equal(theirs, 2 * ours)  # A; B, by alpha / r = 2
