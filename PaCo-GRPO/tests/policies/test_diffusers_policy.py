"""Text cache, sizes, schedules and pixels of the policies that wrap a diffusers pipeline."""

import numpy as np
import pytest
import torch
from tiny_pipelines import SCHEDULER
from tiny_policies import load


@pytest.fixture
def flux(tiny_flux_dir):
    return load("flux", tiny_flux_dir)


def test_sizes_are_rounded(flux):
    assert flux.round_size(33, 40) == (32, 40)
    with pytest.raises(ValueError, match="7x32"):
        flux.round_size(7, 32)
    with pytest.raises(ValueError, match="round_size"):
        flux.sigmas(4, 33, 40)


def test_schedules(flux, tiny_folder):
    """docs/method.md §4: dynamic shift, σ = e^mu / (e^mu + 1/t − 1) with mu linear in the number of
    generated tokens.
    """
    t = np.linspace(1, 0.1, 10)

    def shifted(base, limit, tokens, most):
        mu = (limit - base) / (most - 256) * (tokens - 256) + base
        return np.exp(mu) / (np.exp(mu) + 1 / t - 1)

    qwen = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    end = shifted(SCHEDULER["base_shift"], SCHEDULER["max_shift"], 8 * 12, 8192)
    end = 1 - (1 - end) * (1 - 0.02) / (1 - end[-1])  # stretched: the last step starts at 0.02
    for policy, size, expected in (
        (flux, (64, 64), shifted(0.5, 1.15, 64, 4096)),
        (qwen, (64, 96), end),
    ):
        sigmas = policy.sigmas(10, *size)
        assert sigmas.shape == (11,) and sigmas.dtype == torch.float32
        assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
        np.testing.assert_allclose(sigmas[:-1].numpy(), expected, rtol=1e-5)
    assert len(flux.sigmas(1, 16, 16)) == 2
    with pytest.raises(ValueError, match=r"num_steps = 1\b"):
        qwen.sigmas(1, 32, 32)


def test_images_are_the_bytes_that_diffusers_makes(flux):
    latents = 3 * flux.initial_latents(
        [1, 2, 3], 32, 48
    )  # beyond the range of pixels, so that some are clamped
    unpacked = flux.pipeline._unpack_latents(latents, 32, 48, flux.pipeline.vae_scale_factor)
    with torch.no_grad():
        expected = flux.pipeline.image_processor.postprocess(
            flux._pixels(unpacked), output_type="pil"
        )
    for ours, theirs in zip(flux.decode(latents, 32, 48), expected, strict=True):
        assert ours.mode == "RGB" and ours.size == (48, 32) and ours.tobytes() == theirs.tobytes()
