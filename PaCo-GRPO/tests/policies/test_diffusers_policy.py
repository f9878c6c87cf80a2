"""Text, schedule, noise, sizes, precision and pixels of the policies that wrap a diffusers pipeline."""

import logging

import numpy as np
import pytest
import torch
from tiny_pipelines import SCHEDULER
from tiny_policies import NAMES, items, load

from paco_grpo.types import Item

BY_NAME = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def flux(tiny_flux_dir):
    return load("flux", tiny_flux_dir)


def velocity_of(policy, name, *prompts):
    """At σ = 0.5, from fixed seeds."""
    count = len(prompts)
    arguments = policy.initial_latents(list(range(count)), 32, 32), torch.full((count,), 0.5)
    with torch.no_grad():
        return policy.velocity(*arguments, policy.encode(items(name, *prompts)), 32, 32)


@pytest.mark.parametrize(("name", "limit"), [("flux", 512), ("qwen_image_edit", 1024)])
def test_sequence_length_has_a_limit(tiny_folder, name, limit):
    for length in (0, limit + 1):
        with pytest.raises(ValueError, match=rf"config\.max_sequence_length.*{limit}"):
            load(name, tiny_folder(name), max_sequence_length=length)
    load(name, tiny_folder(name), max_sequence_length=limit)


def test_the_text_cache_is_bounded_and_drops_the_least_recently_used(flux):
    flux._texts.max_bytes = 10_000
    flux.encode([Item(i, f"prompt {i}") for i in (0, 1)])
    size = flux._texts.num_bytes // 2
    flux._texts.max_bytes = 3 * size
    flux.encode([Item(i, f"prompt {i}") for i in (2, 0, 3)])
    assert flux._texts.num_bytes == 3 * size
    assert [(f"prompt {i}", ()) in flux._texts for i in range(4)] == [True, False, True, True]
    flux._texts.max_bytes = 1  # one entry always stays
    flux.encode([Item(4, "prompt 4")])
    assert flux._texts.num_bytes == size and ("prompt 4", ()) in flux._texts


def test_sizes_are_rounded_with_a_log_line(flux, caplog):
    assert flux.size_multiple == 8
    with caplog.at_level(logging.INFO):
        assert flux.round_size(33, 40) == (32, 40)
        assert "33x40" in caplog.text and "32x40" in caplog.text
        caplog.clear()
        assert flux.round_size(32, 8) == (32, 8)
        assert caplog.text == ""
    with pytest.raises(ValueError, match="7x32"):
        flux.round_size(7, 32)
    for size in ((33, 40), (32, 44)):
        with pytest.raises(ValueError, match="round_size"):
            flux.sigmas(4, *size)


def test_schedules(flux, tiny_folder):
    """docs/method.md §4: dynamic shift, σ = e^mu / (e^mu + 1/t − 1) with mu linear in the number of generated tokens."""
    t = np.linspace(1, 0.1, 10)

    def shifted(base, limit, tokens, most):
        mu = (limit - base) / (most - 256) * (tokens - 256) + base
        return np.exp(mu) / (np.exp(mu) + 1 / t - 1)

    qwen = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    end = shifted(SCHEDULER["base_shift"], SCHEDULER["max_shift"], 8 * 12, 8192)
    end = 1 - (1 - end) * (1 - 0.02) / (1 - end[-1])  # stretched: the last step starts at 0.02
    for policy, size, expected in ((flux, (64, 64), shifted(0.5, 1.15, 64, 4096)), (qwen, (64, 96), end)):
        sigmas = policy.sigmas(10, *size)
        assert sigmas.shape == (11,) and sigmas.dtype == torch.float32
        assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
        np.testing.assert_allclose(sigmas[:-1].numpy(), expected, rtol=1e-5)
    assert bool((flux.sigmas(10, 64, 64)[1:-1] > flux.sigmas(10, 16, 16)[1:-1]).all())
    assert len(flux.sigmas(1, 16, 16)) == 2
    with pytest.raises(ValueError, match=r"num_steps = 1\b"):
        qwen.sigmas(1, 32, 32)


@BY_NAME
def test_low_precision_returns_float32(tiny_folder, name):
    low, exact = (load(name, tiny_folder(name), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    velocity = velocity_of(low, name, "a", "bc")
    assert velocity.dtype == torch.float32
    assert 0 < (velocity - velocity_of(exact, name, "a", "bc")).abs().max() < 0.5
    assert {parameter.dtype for parameter in low.pipeline.vae.parameters()} == {torch.float32}
    assert low.decode(low.initial_latents([1], 32, 32), 32, 32)[0].size == (32, 32)


@BY_NAME
def test_images_are_the_bytes_that_diffusers_makes(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    latents = 3 * policy.initial_latents([1, 2, 3], 32, 48)  # beyond the range of pixels, so that some are clamped
    unpacked = policy.pipeline._unpack_latents(latents, 32, 48, policy.pipeline.vae_scale_factor)
    with torch.no_grad():
        expected = policy.pipeline.image_processor.postprocess(policy._pixels(unpacked), output_type="pil")
    found = policy.decode(latents, 32, 48)
    assert [image.size for image in found] == [(48, 32)] * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.mode == "RGB" and np.array_equal(np.asarray(ours), np.asarray(theirs))
