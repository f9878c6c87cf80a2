"""The two toy VAEs, factor 4 with 4 latent channels, trained on grids of every size in use.

The toy FLUX has an AutoencoderKL of 0.17 M parameters, the toy Qwen-Image-Edit an AutoencoderKLQwenImage of 0.45 M. The
latter is a causal video VAE. A single frame meets only the last time slice of every kernel, so training uses that slice as
a 2D convolution (the same numbers, several times faster), and the other slices stay zero. Its attention is switched off (the
output projection is zero), so that a latent depends on its neighborhood alone, at any image size.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageRMS_norm,
)
from torch import nn

from paco_toy.world import CHARACTERS
from toy_models.panels import PanelCache, random_views, to_tensor
from toy_models.training import fit

Z = 4  # latent channels
_WHOLE_SHARE = 0.45  # of the Qwen VAE's time; then its decoder is trained alone


def _grids(caches: dict[int, PanelCache], side: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    characters = rng.integers(len(CHARACTERS), size=(size, 4))
    return to_tensor(caches[side].draw_grids(characters, random_views(size, rng), rng))


def _fit(
    vae: nn.Module,
    encode: Callable,
    decode: Callable,
    caches: dict[int, PanelCache],
    seconds: float,
    seed: int,
    lr: float = 3e-3,
) -> None:
    """Trains a VAE.

    The decoder sees latents with noise of up to 0.2 of their standard deviation, so that it also draws sharply from a
    generator's imperfect latents.

    Args:
        encode: pixels (B, 3, H, W) in [-1, 1] -> mean and log variance of the latents.
        decode: latents -> pixels.
        caches: Panel side in pixels -> panels.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        side = (32, 64, 32, 16, 32)[step % 5]
        pixels = _grids(caches, side, {16: 8, 32: 4, 64: 1}[side], rng).contiguous(memory_format=torch.channels_last)
        mean, log_var = encode(pixels)
        spread = mean.detach().std()
        noise = 0.2 * spread * torch.rand(len(mean), 1, 1, 1)
        decoded = decode(mean + noise * torch.randn_like(mean))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        error = (decoded - pixels) * (1 + 2 * (pixels.amin(dim=1, keepdim=True) < 0.9))  # most of a panel is white
        # The pooled term is about color. Without it outlines are learned first and colors only minutes later.
        pooled = nn.functional.avg_pool2d(error, 4)
        loss = error.abs().mean() + error.square().mean() + 4 * pooled.square().mean() + 1e-4 * kl
        return loss, {"loss": loss, "spread": spread}

    fit([(vae, lr)], next_loss, "vae", seconds=seconds, floor=0.02, betas=(0.9, 0.99), weight_decay=0.0)


def train_vae(caches: dict[int, PanelCache], seconds: float, seed: int) -> AutoencoderKL:
    """A trained VAE for FLUX, with scaling and shift factors measured on its latents. It has no attention: any grid size."""
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32), layers_per_block=1, latent_channels=Z, norm_num_groups=4, mid_block_add_attention=False,
        use_quant_conv=False, use_post_quant_conv=False, sample_size=128, scaling_factor=1.0, shift_factor=0.0,
    ).to(memory_format=torch.channels_last)  # fmt: skip

    def encode(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vae.encoder(pixels).chunk(2, dim=1)

    _fit(vae, encode, vae.decoder, caches, seconds, seed)
    rng = np.random.default_rng([seed, 5])
    with torch.no_grad():
        latents = torch.cat([encode(_grids(caches, s, 64, rng))[0].flatten() for s in (32, 64)])
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return vae.to(memory_format=torch.contiguous_format)


def flux_latents(vae: AutoencoderKL) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from pixels (B, 3, H, W) in [-1, 1] to latents as FluxPipeline uses them."""
    return lambda x: (vae.encode(x).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


def new_qwen_vae(seed: int) -> AutoencoderKLQwenImage:
    """An untrained AutoencoderKLQwenImage without attention and without use of time."""
    torch.manual_seed(seed)
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=Z, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, False],
        latents_mean=[0.0] * Z, latents_std=[1.0] * Z,
    )  # fmt: skip
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, QwenImageCausalConv3d):
                module.weight[:, :, :-1] = 0
            elif isinstance(module, QwenImageAttentionBlock):
                nn.init.zeros_(module.proj.weight)
                nn.init.zeros_(module.proj.bias)
                module.requires_grad_(False)
    return vae


@contextmanager
def stills_only(vae: AutoencoderKLQwenImage):
    """Inside, the modules of ``vae`` compute the same numbers for one-frame videos in less time, with gradients."""

    def convolve(self: QwenImageCausalConv3d, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
        """The causal convolution of one frame (B, C, 1, H, W)."""
        weight, padding = self.weight[:, :, -1], self._padding[0]
        return nn.functional.conv2d(x[:, :, 0], weight, self.bias, self.stride[1:], padding).unsqueeze(2)

    def norm(self: QwenImageRMS_norm, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-12) * self.gamma)

    faster = {QwenImageCausalConv3d: convolve, QwenImageRMS_norm: norm, QwenImageAttentionBlock: lambda self, x: x}
    patched = [m for m in vae.modules() if type(m) in faster]
    for module in patched:
        module.forward = types.MethodType(faster[type(module)], module)
    try:
        yield
    finally:
        for module in patched:
            del module.forward


def train_qwen_vae(vae: AutoencoderKLQwenImage, caches: dict[int, PanelCache], seconds: float, seed: int) -> None:
    """Trains a VAE of ``new_qwen_vae`` and sets the mean and deviation of its latents; then trains its decoder alone."""

    def encode(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vae.quant_conv(vae.encoder(pixels.unsqueeze(2))).squeeze(2).chunk(2, dim=1)

    def decode(latents: torch.Tensor) -> torch.Tensor:
        return vae.decoder(vae.post_quant_conv(latents.unsqueeze(2))).squeeze(2)

    with stills_only(vae):
        _fit(vae, encode, decode, caches, _WHOLE_SHARE * seconds, seed)
        rng = np.random.default_rng([seed, 5])
        with torch.no_grad():
            rows = [encode(_grids(caches, s, 64, rng))[0].transpose(0, 1).flatten(1) for s in (32, 64)]
        values = torch.cat(rows, dim=1).double()
        vae.register_to_config(latents_mean=values.mean(dim=1).tolist(), latents_std=values.std(dim=1).tolist())
        encoder = [p for m in (vae.encoder, vae.quant_conv) for p in m.parameters() if p.requires_grad]
        for parameter in encoder:
            parameter.requires_grad_(False)
        _fit(vae, encode, decode, caches, (1 - _WHOLE_SHARE) * seconds, seed + 1, lr=2e-3)
        for parameter in encoder:
            parameter.requires_grad_(True)


def qwen_latents(vae: AutoencoderKLQwenImage) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from pixels (B, 3, H, W) in [-1, 1] to the transformer's latents (B, Z, H/4, W/4), standardized per channel."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return lambda x: (vae.encode(x.unsqueeze(2)).latent_dist.mode().squeeze(2) - mean) / std
