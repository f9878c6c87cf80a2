"""Text cache, sizes, schedules and pixels of the policies that wrap a diffusers pipeline."""

import pytest
import torch
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
