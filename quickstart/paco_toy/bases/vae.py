"""The toy VAE: an AutoencoderKL of 0.17 M parameters (factor 4, 4 latent channels), trained on grids of every size in use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from paco_toy.bases.panels import PanelCache, random_views
from paco_toy.world import CHARACTERS

logger = logging.getLogger(__name__)


def new_vae() -> AutoencoderKL:
    """An untrained AutoencoderKL: factor 4, 4 latent channels, no attention (grids of any size)."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=128,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def grid_pixels(caches: dict[int, PanelCache], side: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    """`size` random grids of panels of `side` pixels: float32 (size, 3, 2 side, 2 side) in [-1, 1]."""
    characters = rng.integers(len(CHARACTERS), size=(size, 4))
    grids = caches[side].draw_grids(characters, random_views(size, rng), rng)
    return torch.from_numpy(grids).permute(0, 3, 1, 2).float() / 127.5 - 1


def fit_vae(
    vae: nn.Module,
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    decode: Callable[[torch.Tensor], torch.Tensor],
    caches: dict[int, PanelCache],
    seconds: float,
    seed: int,
    lr: float = 3e-3,
) -> None:
    """Trains any image VAE for a fixed wall-clock time and leaves it in eval mode.

    The decoder sees latents with noise of up to 0.2 of their own spread, so that it draws sharply from a generator's
    imperfect latents too.

    Args:
        encode: pixels (B, 3, H, W) in [-1, 1] -> mean and log variance of the latents.
        decode: latents -> pixels.
        caches: panel side in pixels -> panels; grids of 2S pixels are trained on.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae.train()
    optimizer = torch.optim.AdamW(
        [p for p in vae.parameters() if p.requires_grad], lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    batches = {16: 8, 32: 4, 64: 1}
    started, step, log_at = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - started) < seconds:
        progress = elapsed / seconds
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * max(0.02, min(1.0, (1 - progress) / 0.5))
        side = (32, 64, 32, 16, 32)[step % 5]
        pixels = grid_pixels(caches, side, batches[side], rng).contiguous(memory_format=torch.channels_last)
        mean, log_var = encode(pixels)
        spread = mean.detach().std()
        noise = 0.2 * spread * torch.rand(len(mean), 1, 1, 1)
        decoded = decode(mean + noise * torch.randn_like(mean))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        error = (decoded - pixels) * (1 + 2 * (pixels.amin(dim=1, keepdim=True) < 0.9))  # most of a panel is white
        # the pooled term is about colour: without it the outlines come first and colours only minutes later
        pooled = nn.functional.avg_pool2d(error, 4)
        loss = error.abs().mean() + error.square().mean() + 4 * pooled.square().mean() + 1e-4 * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if elapsed > log_at:
            logger.info(
                "vae %4.0f/%.0f s step %d loss %.4f spread %.2f", elapsed, seconds, step, loss.item(), spread.item()
            )
            log_at += 20
    vae.eval()


def train_vae(caches: dict[int, PanelCache], seconds: float, seed: int) -> AutoencoderKL:
    """Trains the toy FLUX's VAE (`fit_vae`) and sets its scaling and shift factors from data."""
    torch.manual_seed(seed)
    vae = new_vae().to(memory_format=torch.channels_last)

    def encode(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vae.encoder(pixels).chunk(2, dim=1)

    fit_vae(vae, encode, vae.decoder, caches, seconds, seed)
    rng = np.random.default_rng([seed, 5])
    with torch.no_grad():
        latents = torch.cat([encode(grid_pixels(caches, s, 64, rng))[0].flatten() for s in (32, 64)])
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return vae.to(memory_format=torch.contiguous_format)


@torch.no_grad()
def round_trip(vae: AutoencoderKL, pixels: np.ndarray) -> np.ndarray:
    """uint8 (B, H, W, 3) through encoder and decoder, back to uint8."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    return ((y.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
