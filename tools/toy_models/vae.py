"""The toy FLUX's VAE, an AutoencoderKL of 0.17 M parameters: factor 4, 4 latent channels, trained on grids of every size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from paco_toy.world import CHARACTERS
from toy_models.panels import PanelCache, random_views, to_tensor
from toy_models.training import fit

Z = 4  # latent channels


def _grids(caches: dict[int, PanelCache], side: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    characters = rng.integers(len(CHARACTERS), size=(size, 4))
    return to_tensor(caches[side].draw_grids(characters, random_views(size, rng), rng))


def train_vae(caches: dict[int, PanelCache], seconds: float, seed: int) -> AutoencoderKL:
    """A trained VAE for FLUX, with scaling and shift factors measured on its latents. It has no attention: any grid size.

    The decoder sees latents with noise of up to 0.2 of their standard deviation, so that it also draws sharply from a
    generator's imperfect latents.
    """
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32), layers_per_block=1, latent_channels=Z, norm_num_groups=4, mid_block_add_attention=False,
        use_quant_conv=False, use_post_quant_conv=False, sample_size=128, scaling_factor=1.0, shift_factor=0.0,
    ).to(memory_format=torch.channels_last)  # fmt: skip
    rng = np.random.default_rng(seed)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        side = (32, 64, 32, 16, 32)[step % 5]
        pixels = _grids(caches, side, {16: 8, 32: 4, 64: 1}[side], rng).contiguous(memory_format=torch.channels_last)
        mean, log_var = vae.encoder(pixels).chunk(2, dim=1)
        spread = mean.detach().std()
        noise = 0.2 * spread * torch.rand(len(mean), 1, 1, 1)
        decoded = vae.decoder(mean + noise * torch.randn_like(mean))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        error = (decoded - pixels) * (1 + 2 * (pixels.amin(dim=1, keepdim=True) < 0.9))  # most of a panel is white
        # The pooled term is about color. Without it outlines are learned first and colors only minutes later.
        pooled = nn.functional.avg_pool2d(error, 4)
        loss = error.abs().mean() + error.square().mean() + 4 * pooled.square().mean() + 1e-4 * kl
        return loss, {"loss": loss, "spread": spread}

    fit([(vae, 3e-3)], next_loss, "vae", seconds=seconds, floor=0.02, betas=(0.9, 0.99), weight_decay=0.0)
    rng = np.random.default_rng([seed, 5])
    with torch.no_grad():
        latents = torch.cat([vae.encoder(_grids(caches, s, 64, rng)).chunk(2, dim=1)[0].flatten() for s in (32, 64)])
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return vae.to(memory_format=torch.contiguous_format)


def flux_latents(vae: AutoencoderKL) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from pixels (B, 3, H, W) in [-1, 1] to latents as FluxPipeline uses them."""
    return lambda x: (vae.encode(x).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
