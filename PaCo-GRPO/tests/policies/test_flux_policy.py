"""FLUX through our policy equals FLUX through diffusers' pipeline."""

import logging

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from tiny_flux import build_tiny_flux

from paco_grpo.policies import load_policy
from paco_grpo.sampling.denoise import rollout
from paco_grpo.types import Item

LENGTH = 24


def items(*prompts: str) -> list[Item]:
    return [Item(item_id=i, prompt=prompt) for i, prompt in enumerate(prompts)]


def our_latents(policy, prompts, seeds, height, width, num_steps=4, **kwargs):
    options = {"num_steps": num_steps, "noise_steps": (), "noise_level": 0.7} | kwargs
    record = rollout(policy, policy.encode(items(*prompts)), range(len(prompts)), seeds, height, width, **options)
    return record.clean_latents


@pytest.mark.parametrize("height,width", [(32, 32), (48, 32)])
@pytest.mark.parametrize("shape", ["default", "other VAE, no guidance"])
def test_same_image_as_the_diffusers_pipeline(tmp_path, shape, height, width):
    options = {} if shape == "default" else {"vae_channels": (4, 8), "latent_channels": 3, "guidance_embeds": False}
    folder = build_tiny_flux(tmp_path, **options)
    policy = load_policy(folder, max_sequence_length=LENGTH, guidance_scale=2.5)
    prompts, seeds = ["a red star", "a blue circle, striped"], [5, 2**31 + 7]

    latents = our_latents(policy, prompts, seeds, height, width)
    images = policy.decode(latents, height, width)

    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    arguments = {
        "height": height,
        "width": width,
        "num_inference_steps": 4,
        "guidance_scale": 2.5,
        "max_sequence_length": LENGTH,
    }
    theirs = pipe(
        prompts, generator=[torch.Generator().manual_seed(s) for s in seeds], output_type="latent", **arguments
    )
    assert (latents - theirs.images).abs().max() < 1e-4
    noise = policy.initial_latents(seeds, height, width)
    pictures = pipe(prompts, latents=noise, **arguments).images
    for ours, reference in zip(images, pictures, strict=True):
        assert ours.size == (width, height) and ours.mode == "RGB"
        assert np.abs(np.asarray(ours, np.int16) - np.asarray(reference, np.int16)).max() <= 1
    # and with a noise step whose level is 0
    silent = our_latents(policy, prompts, seeds, height, width, noise_steps=(1,), noise_level=0.0)
    assert torch.equal(silent, latents)


def test_guidance_and_sequence_length_do_something(tiny_flux_dir):
    base = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    prompt, seed = ["abc" * 20], [3]
    reference = our_latents(base, prompt, seed, 16, 16)
    guided = load_policy(tiny_flux_dir, max_sequence_length=LENGTH, guidance_scale=9.0)
    longer = load_policy(tiny_flux_dir, max_sequence_length=64)
    assert longer.encode(items("a")).prompt_embeds.shape[1] == 64
    assert not torch.allclose(our_latents(guided, prompt, seed, 16, 16), reference, atol=1e-5)
    assert not torch.allclose(our_latents(longer, prompt, seed, 16, 16), reference, atol=1e-5)
    with pytest.raises(ValueError, match="between 1 and 512"):
        load_policy(tiny_flux_dir, max_sequence_length=513)


def test_each_prompt_is_encoded_once(tiny_flux_dir, monkeypatch):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    calls = []
    forward = policy.pipeline.text_encoder_2.forward
    monkeypatch.setattr(
        policy.pipeline.text_encoder_2, "forward", lambda *a, **k: calls.append(a[0].shape[0]) or forward(*a, **k)
    )
    first = policy.encode(items("a", "b", "a", "a"))
    second = policy.encode(items("b", "c"))
    assert calls == [1, 1, 1]
    assert len(first) == 4 and torch.equal(first.prompt_embeds[1], second.prompt_embeds[0])
    assert torch.equal(first.select([2]).prompt_embeds, first.select([0]).prompt_embeds)


def test_text_cache_is_bounded(tiny_flux_dir):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    policy._texts.max_bytes = 10_000
    policy.encode(items(*[f"prompt {i}" for i in range(9)]))
    assert 0 < policy._texts.num_bytes <= 10_000
    assert "prompt 8" in policy._texts and "prompt 0" not in policy._texts


def test_initial_latents_depend_on_their_seed_alone(tiny_flux_dir):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    batch = policy.initial_latents([1, 2, 3], 16, 24)
    assert batch.shape == (3, 6, 16) and batch.dtype == torch.float32
    assert torch.equal(batch[1:2], policy.initial_latents([2], 16, 24))


def test_sizes_are_rounded_with_a_log_line(tiny_flux_dir, caplog):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    assert policy.size_multiple == 8
    with caplog.at_level(logging.INFO):
        assert policy.round_size(33, 40) == (32, 40)
        assert "33x40 rounded to 32x40" in caplog.text
        caplog.clear()
        assert policy.round_size(32, 40) == (32, 40)
        assert caplog.text == ""
    with pytest.raises(ValueError, match="too small"):
        policy.round_size(7, 32)
    with pytest.raises(ValueError, match="33x40.*round_size"):
        policy.sigmas(4, 33, 40)


def test_sigmas(tiny_flux_dir):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    small, large = policy.sigmas(10, 16, 16), policy.sigmas(10, 64, 64)
    for sigmas in (small, large):
        assert sigmas.shape == (11,) and sigmas.dtype == torch.float32
        assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    # method §4: dynamic shift; sigma = e^mu / (e^mu + 1/t − 1) with mu linear in the number of tokens
    t = np.linspace(1, 0.1, 10)
    mu = (1.15 - 0.5) / (4096 - 256) * (64 - 256) + 0.5
    np.testing.assert_allclose(large[:-1].numpy(), np.exp(mu) / (np.exp(mu) + 1 / t - 1), rtol=1e-6)
    assert bool((large[1:-1] > small[1:-1]).all())


def test_low_precision_runs_and_returns_float32(tiny_flux_dir):
    policy = load_policy(tiny_flux_dir, max_sequence_length=LENGTH, dtype=torch.bfloat16)
    reference = load_policy(tiny_flux_dir, max_sequence_length=LENGTH)
    latents = our_latents(policy, ["a"], [1], 16, 16)
    assert latents.dtype == torch.float32
    difference = (latents - our_latents(reference, ["a"], [1], 16, 16)).abs().max()
    assert 0 < difference < 0.2
    assert policy.decode(latents, 16, 16)[0].size == (16, 16)
