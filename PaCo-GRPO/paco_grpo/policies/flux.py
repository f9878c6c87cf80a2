"""FLUX.1 text-to-image behind the policy interface, through diffusers' own FluxPipeline and its components."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from paco_grpo.policies.adapters import save_diffusers
from paco_grpo.policies.base import Policy, PolicyLoadError
from paco_grpo.types import Conditioning, Item

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

_TEXT_CACHE_BYTES = 1 << 30


@dataclass
class FluxConditioning(Conditioning):
    """Text features of FLUX: T5 tokens and CLIP's pooled vector."""

    prompt_embeds: torch.Tensor  # (B, L, D) in the policy's dtype
    pooled_prompt_embeds: torch.Tensor  # (B, P) in the policy's dtype


class FluxPolicy(Policy):
    """FLUX.1-dev and everything saved as a ``FluxPipeline``; nothing about sizes or channels is assumed.

    Text features are cached on the CPU (least recently used dropped beyond 1 GiB), so the text encoders see each
    prompt once and can be moved off the accelerator in between. Position ids and schedules are cached per size.
    """

    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def __init__(
        self,
        pipeline: FluxPipeline,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_sequence_length: int = 512,
        guidance_scale: float = 3.5,
    ) -> None:
        """Wrap a loaded pipeline: freeze it, put it on ``device``; arguments as in ``from_pretrained``."""
        if not 1 <= max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length = {max_sequence_length} must lie between 1 and 512 (FLUX's limit)")
        if not isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
            raise PolicyLoadError(
                f"the pipeline's scheduler is a {type(pipeline.scheduler).__name__}, but rectified-flow sampling needs "
                "a FlowMatchEulerDiscreteScheduler: correct scheduler/scheduler_config.json."
            )
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.dtype = dtype
        self.max_sequence_length = max_sequence_length
        self.guidance_scale = guidance_scale
        self.transformer = pipeline.transformer
        self._transformer_config = pipeline.transformer.config
        # A scheduler of our own: set_timesteps leaves state behind.
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)
        self.size_multiple = 2 * pipeline.vae_scale_factor
        self._texts: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._text_bytes = 0
        self._sigmas: dict[tuple[int, int, int], torch.Tensor] = {}
        self._image_ids: dict[tuple[int, int], torch.Tensor] = {}
        self._text_ids: dict[int, torch.Tensor] = {}
        for module in (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
            module.requires_grad_(False).eval()
        _place(pipeline.transformer, self.device, dtype)
        # float32 VAE: decoding in bf16 shows in the pixels, and the VAE is small.
        _place(pipeline.vae, self.device, torch.float32)
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
            _place(encoder, self.device, dtype)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_sequence_length: int = 512,
        guidance_scale: float = 3.5,
    ) -> Self:
        """Load with ``FluxPipeline.from_pretrained``; see :meth:`Policy.from_pretrained`."""
        try:
            pipeline = FluxPipeline.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise PolicyLoadError(
                f"cannot load the FLUX pipeline at {path}: {type(error).__name__}: {error}. "
                "The folder may be incomplete or damaged: download or build it again."
            ) from error
        return cls(
            pipeline,
            dtype=dtype,
            device=device,
            max_sequence_length=max_sequence_length,
            guidance_scale=guidance_scale,
        )

    # --- text -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> FluxConditioning:
        """See :meth:`Policy.encode`; a prompt goes through T5 and CLIP once as long as it stays in the cache."""
        rows = [self._encode_text(item.prompt) for item in items]
        return FluxConditioning(
            prompt_embeds=torch.stack([row[0] for row in rows]).to(self.device),
            pooled_prompt_embeds=torch.stack([row[1] for row in rows]).to(self.device),
        )

    def _encode_text(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        if prompt in self._texts:
            self._texts.move_to_end(prompt)
            return self._texts[prompt]
        # One prompt at a time: the features then do not depend, to the last bit, on which prompts come together, so
        # a resumed run (whose cache is empty) computes the same numbers.
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt, device="cpu", max_sequence_length=self.max_sequence_length
        )
        row = embeds[0].to(self.dtype), pooled[0].to(self.dtype)
        self._texts[prompt] = row
        self._text_bytes += _num_bytes(row)
        while self._text_bytes > _TEXT_CACHE_BYTES and len(self._texts) > 1:
            _, dropped = self._texts.popitem(last=False)
            self._text_bytes -= _num_bytes(dropped)
        return row

    def move_text_encoders(self, device: torch.device | str) -> None:
        """See :meth:`Policy.move_text_encoders`."""
        self.pipeline.text_encoder.to(device)
        self.pipeline.text_encoder_2.to(device)

    # --- latents ----------------------------------------------------------------------------------------------------

    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """See :meth:`Policy.sigmas`: linspace(1, 1/N, N), shifted by mu from the number of latent tokens."""
        rows, columns = self._grid(height, width)
        key = (num_steps, rows, columns)
        if key not in self._sigmas:
            config = self._scheduler.config
            mu = calculate_shift(
                rows * columns,
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.15),
            )
            retrieve_timesteps(self._scheduler, sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
            self._sigmas[key] = self._scheduler.sigmas.to("cpu", torch.float32)
        return self._sigmas[key]

    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        """See :meth:`Policy.initial_latents`; the same noise as FluxPipeline with CPU generators of these seeds."""
        rows, columns = self._grid(height, width)
        channels = self._transformer_config.in_channels // 4
        shape = (1, channels, 2 * rows, 2 * columns)
        noise = torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds])
        packed = self.pipeline._pack_latents(noise, len(seeds), channels, 2 * rows, 2 * columns)
        return packed.to(self.device)

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, conditioning: FluxConditioning, height: int, width: int
    ) -> torch.Tensor:
        """See :meth:`Policy.velocity`. FluxTransformer2DModel takes σ in [0, 1] and multiplies by 1000 itself."""
        batch = latents.shape[0]
        with self.autocast():
            velocity = self.transformer(
                hidden_states=latents.to(self.dtype),
                timestep=sigma,
                guidance=self._guidance_for(batch),
                pooled_projections=conditioning.pooled_prompt_embeds,
                encoder_hidden_states=conditioning.prompt_embeds,
                txt_ids=self._text_ids_for(conditioning.prompt_embeds.shape[1]),
                img_ids=self._image_ids_for(height, width),
                return_dict=False,
            )[0]
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        """See :meth:`Policy.decode`; all of ``latents`` in one VAE call, so the caller's batch bounds the memory."""
        vae = self.pipeline.vae
        unpacked = self.pipeline._unpack_latents(latents, height, width, self.pipeline.vae_scale_factor)
        unpacked = unpacked.to(vae.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(unpacked, return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(pixels, output_type="pil")

    def move_vae(self, device: torch.device | str) -> None:
        """See :meth:`Policy.move_vae`."""
        self.pipeline.vae.to(device)

    def save_lora(self, directory: str | Path) -> None:
        """See :meth:`Policy.save_lora`."""
        save_diffusers(self, directory)

    # --- small caches -----------------------------------------------------------------------------------------------

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of latent tokens."""
        if height % self.size_multiple or width % self.size_multiple:
            raise ValueError(
                f"image size {height}x{width} is not a multiple of {self.size_multiple} pixels: use round_size first"
            )
        return height // self.size_multiple, width // self.size_multiple

    def _image_ids_for(self, height: int, width: int) -> torch.Tensor:
        key = self._grid(height, width)
        if key not in self._image_ids:
            self._image_ids[key] = self.pipeline._prepare_latent_image_ids(1, *key, self.device, self.dtype)
        return self._image_ids[key]

    def _text_ids_for(self, length: int) -> torch.Tensor:
        if length not in self._text_ids:
            self._text_ids[length] = torch.zeros(length, 3, device=self.device, dtype=self.dtype)
        return self._text_ids[length]

    def _guidance_for(self, batch: int) -> torch.Tensor | None:
        if not self._transformer_config.guidance_embeds:
            return None
        return torch.full((batch,), self.guidance_scale, device=self.device, dtype=torch.float32)


def _place(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move and cast; the cast only where needed, since diffusers warns at each."""
    if any(parameter.dtype != dtype for parameter in module.parameters()):
        torch.nn.Module.to(module, dtype=dtype)
    module.to(device)


def _num_bytes(row: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row)
