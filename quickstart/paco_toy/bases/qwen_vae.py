"""The toy Qwen-Image VAE: an AutoencoderKLQwenImage of 0.45 M parameters (factor 4, 4 latent channels), for still pictures.

The class is a causal video VAE. One frame meets only the last time slice of every kernel, so training works with that slice
as a 2D convolution (the same numbers, several times faster) and the other slices stay zero. The attention in the middle is
switched off (its output projection is zero): then what a latent says depends on its neighbourhood alone, at any image size.
"""

from __future__ import annotations

import types
from contextlib import contextmanager

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageRMS_norm,
)
from torch import nn

from paco_toy.bases.panels import PanelCache
from paco_toy.bases.vae import fit_vae, grid_pixels

Z = 4  # latent channels
_WHOLE_SHARE = 0.45  # of the time; the rest is the decoder's alone


def new_qwen_vae(seed: int) -> AutoencoderKLQwenImage:
    """An untrained AutoencoderKLQwenImage: factor 4, 4 latent channels, no attention, no use of time."""
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
                for tensor in (module.proj.weight, module.proj.bias):
                    nn.init.zeros_(tensor)
                module.requires_grad_(False)
    return vae


def _still_convolution(self: QwenImageCausalConv3d, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
    """The causal convolution of one frame (B, C, 1, H, W): only the last time slice of the kernel meets it."""
    return nn.functional.conv2d(
        x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], self._padding[0]
    ).unsqueeze(2)


def _plain_norm(self: QwenImageRMS_norm, x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-12) * self.gamma)


@contextmanager
def stills_only(vae: AutoencoderKLQwenImage):
    """Inside, the modules of `vae` compute the same numbers for one-frame videos in less time, with gradients."""
    faster = {
        QwenImageCausalConv3d: _still_convolution,
        QwenImageRMS_norm: _plain_norm,
        QwenImageAttentionBlock: lambda self, x: x,
    }
    patched = [m for m in vae.modules() if type(m) in faster]
    for module in patched:
        module.forward = types.MethodType(faster[type(module)], module)
    try:
        yield vae
    finally:
        for module in patched:
            del module.forward


def train_qwen_vae(vae: AutoencoderKLQwenImage, caches: dict[int, PanelCache], seconds: float, seed: int) -> None:
    """Trains a VAE of `new_qwen_vae` and sets its latents' means and deviations from data; then trains its decoder longer.

    Args:
        caches: panel side in pixels -> panels; grids of 2S pixels are trained on.
    """
    _fit(vae, caches, _WHOLE_SHARE * seconds, seed, lr=3e-3)
    rng = np.random.default_rng([seed, 5])
    with torch.no_grad(), stills_only(vae):
        rows = [_encode(vae, grid_pixels(caches, s, 64, rng))[0].transpose(0, 1).flatten(1) for s in (32, 64)]
    values = torch.cat(rows, dim=1).double()
    vae.register_to_config(latents_mean=values.mean(dim=1).tolist(), latents_std=values.std(dim=1).tolist())
    train_decoder(vae, caches, (1 - _WHOLE_SHARE) * seconds, seed + 1)


def train_decoder(vae: AutoencoderKLQwenImage, caches: dict[int, PanelCache], seconds: float, seed: int) -> None:
    """Trains the decoder alone: what latents mean stays as it is, so a transformer that knows them may learn meanwhile."""
    learning = [p for m in (vae.encoder, vae.quant_conv) for p in m.parameters() if p.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    _fit(vae, caches, seconds, seed, lr=2e-3)
    for parameter in learning:
        parameter.requires_grad_(True)


def _encode(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance of latents of pixels (B, 3, H, W)."""
    return vae.quant_conv(vae.encoder(pixels.unsqueeze(2))).squeeze(2).chunk(2, dim=1)


def _fit(vae: AutoencoderKLQwenImage, caches: dict[int, PanelCache], seconds: float, seed: int, lr: float) -> None:
    def decode(latents: torch.Tensor) -> torch.Tensor:
        return vae.decoder(vae.post_quant_conv(latents.unsqueeze(2))).squeeze(2)

    with stills_only(vae):
        fit_vae(vae, lambda pixels: _encode(vae, pixels), decode, caches, seconds, seed, lr)


def normalised_latents(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> torch.Tensor:
    """Pixels (B, 3, H, W) in [-1, 1] to the transformer's latents (B, Z, H/4, W/4): standardised per channel."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return (vae.encode(pixels.unsqueeze(2)).latent_dist.mode().squeeze(2) - mean) / std


@torch.no_grad()
def qwen_round_trip(vae: AutoencoderKLQwenImage, pixels: np.ndarray) -> np.ndarray:
    """uint8 (B, H, W, 3) through encoder and decoder, back to uint8."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = vae.decode(vae.encode(x.unsqueeze(2)).latent_dist.mode()).sample.squeeze(2)
    return ((y.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
