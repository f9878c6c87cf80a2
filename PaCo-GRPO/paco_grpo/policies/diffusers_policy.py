"""A diffusers pipeline as a policy: the base class of every generator in ``POLICIES``."""

import hashlib
import inspect
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from PIL import Image
from safetensors import SafetensorError
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from paco_grpo.policies.base import Policy, PolicyLoadError, PolicySettings
from paco_grpo.policies.memory import (
    Offloaded,
    TensorCache,
    fits_beside_training,
    quantize_layers,
)
from paco_grpo.policies.models import load_models, place
from paco_grpo.types import Conditioning, Item, to_device

logger = logging.getLogger(__name__)

CACHE_BYTES = 1 << 30  # of encoded texts, and again of encoded reference images

_ATTENTION_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


def lora_targets_with(
    *feed_forwards: str, layers: tuple[str, str] = ("net.0.proj", "net.2")
) -> tuple[str, ...]:
    """Every attention projection, and both ``layers`` of the blocks' ``feed_forwards``.

    See docs/method.md §6.
    """
    names = itertools.product(feed_forwards, layers)
    return _ATTENTION_TARGETS + tuple(f"{name}.{layer}" for name, layer in names)


@dataclass(kw_only=True)
class TextConditioning(Conditioning):
    """Features of the prompt and, for true CFG, of the negative prompt.

    Texts are padded to the longest of their call to ``encode``, and selecting rows does not change
    that: rollout and training compute the same numbers.
    """

    prompt_embeds: torch.Tensor  # (B, L, D) in the policy's dtype
    # (B, L) bool on the CPU, True = token; None = all have L tokens
    prompt_mask: torch.Tensor | None = None
    prompt_pooled: torch.Tensor | None = None  # (B, P), CLIP's vectors in models that use them
    negative_embeds: torch.Tensor | None = None  # (B, L', D)
    negative_mask: torch.Tensor | None = None  # (B, L')
    negative_pooled: torch.Tensor | None = None  # (B, P)


@dataclass(frozen=True)
class ForwardInputs:
    """The arguments of ``Policy.velocity``."""

    latents: torch.Tensor
    sigma: torch.Tensor
    conditioning: TextConditioning
    height: int
    width: int
    negative: bool = False  # with the negative prompt

    @property
    def text(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Features, mask and pooled features of the text."""
        name = "negative" if self.negative else "prompt"
        features = []
        for part in ("embeds", "mask", "pooled"):
            feature = getattr(self.conditioning, f"{name}_{part}")
            features.append(None if feature is None else feature.contiguous())
        return tuple(features)


class DiffusersPolicy(Policy):
    """A loaded diffusers pipeline whose latents are packed 2x2 into tokens.

    Sizes and channels are read from the pipeline. A subclass names its ``pipeline_class`` and its
    text encoders, and defines ``_encode_text`` and ``_forward``. Where its pipeline differs from
    FLUX.1's, it overrides ``_noise_shape``, ``_pack`` and ``_unpack`` (see ``FlatLatents``),
    ``_mu`` or ``_pixels``. Encoded inputs are cached on the CPU.
    """

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    family: ClassVar[str]  # for messages
    # The pipeline shifts linspace(1, 1/N, N); else the scheduler's own sigmas.
    linear_sigmas: ClassVar[bool] = True
    transformer: ModelMixin
    # Lines of Python for model cards that give the plain pipeline ``pipe`` this policy's numbers.
    card_setup: str = ""

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        """Freeze ``pipeline`` and put it on the device of ``settings``."""
        self.pipeline = pipeline
        self.device = torch.device(settings.device)
        self.dtype = settings.dtype
        self.step_dtype = settings.dtype  # to which the plain pipeline rounds latents at each step
        self.max_sequence_length = settings.max_sequence_length
        self.guidance_scale = settings.guidance_scale
        self.negative_prompt = settings.negative_prompt
        self.transformer = pipeline.transformer
        self.size_multiple = self.size_multiple_with(pipeline.vae.config)
        self._transformer_config = pipeline.transformer.config
        # With a state of its own.
        self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)
        self._cached_texts = TensorCache(CACHE_BYTES)
        # Positions of tokens: they are computed on the CPU, so they are kept on the device.
        self._ids: dict[tuple, Any] = {}
        for module in (pipeline.transformer, pipeline.vae, *self.text_encoders()):
            module.requires_grad_(False).eval()
        if settings.quantize is not None:
            place(pipeline.transformer, torch.device("cpu"), self.dtype)
            quantize_layers(pipeline.transformer, self.dtype, self.device)
            pipeline.transformer.to(self.device)  # the other layers; the quantized ones are there
        else:
            place(pipeline.transformer, self.device, self.dtype)
        # The VAE is small, and decoding in bfloat16 is visible in the pixels.
        place(pipeline.vae, self.device, torch.float32)
        on_gpu = self.device.type == "cuda"
        for encoder in self.text_encoders():
            # Weights that never leave main memory stay parts of mapped files, which processes
            # share.
            place(encoder, torch.device("cpu") if on_gpu else self.device, self.dtype)
        self.offloads_text_encoders = on_gpu
        self._offloaded_text = Offloaded(self.text_encoders() if on_gpu else (), self.device)
        self._offloaded_vae = Offloaded((), self.device)

    @classmethod
    @override
    def from_pretrained(cls, path: str | Path, settings: PolicySettings) -> Self:
        try:
            models = load_models(path, settings.dtype)
            pipeline = cls.pipeline_class.from_pretrained(path, dtype=settings.dtype, **models)
        except (
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            LookupError,
            AttributeError,
            SafetensorError,
        ) as error:
            raise PolicyLoadError(
                f"cannot load the {cls.family} pipeline at {path}, perhaps because it is "
                "incomplete: download or build it "
                f"again ({type(error).__name__}: {error})"
            ) from error
        return cls(pipeline, settings)

    @abstractmethod
    def text_encoders(self) -> Sequence[nn.Module]:
        """The modules that only ``encode`` needs."""

    @override
    def encode(self, items: Sequence[Item], text_tokens: int | None = None) -> TextConditioning:
        return TextConditioning(**self._encode_texts(items, [()] * len(items), text_tokens))

    @torch.no_grad()
    def _encode_texts(
        self,
        items: Sequence[Item],
        seen: Sequence[Sequence[Image.Image]],
        text_tokens: int | None,
    ) -> dict[str, torch.Tensor | None]:
        """The fields of ``TextConditioning``; ``seen``: the images that go with each text.

        Each (text, images) goes through the encoders alone: in a batch, the last bits would depend
        on the other texts.
        """
        fields: dict[str, torch.Tensor | None] = {}
        length = text_tokens or self.max_sequence_length
        digests = [tuple(map(image_digest, images)) for images in seen]
        # One transfer of the encoders for all texts that are not cached
        with ExitStack() as copied:

            def compute(text: str, images: Sequence[Image.Image]) -> tuple[torch.Tensor, ...]:
                copied.enter_context(self._offloaded_text.on_device())
                encoded = self._encode_text(text, length, *images)
                return tuple(features.to(self.dtype) for features in encoded)

            texts_of = {"prompt": [item.prompt for item in items]}
            if self.uses_true_cfg:
                texts_of["negative"] = [self.negative_prompt] * len(items)
            for name, texts in texts_of.items():
                rows = []
                for text, digest, images in zip(texts, digests, seen, strict=True):
                    compute_row = partial(compute, text, images)
                    rows.append(self._cached_texts.get((text, digest, length), compute_row))
                embeds, *pooled = zip(*rows, strict=True)
                lengths = torch.tensor([len(features) for features in embeds])
                mask = torch.arange(int(lengths.max())) < lengths[:, None]
                fields[f"{name}_embeds"] = self._padded(embeds)
                fields[f"{name}_mask"] = None if mask.all() else mask
                fields[f"{name}_pooled"] = self._padded(*pooled) if pooled else None
        return fields

    def _padded(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """``rows`` on the device, padded to the longest.

        Rows of one tensor, as for a negative prompt, are not copied.
        """
        if all(row is rows[0] for row in rows):
            return rows[0].to(self.device).expand(len(rows), *rows[0].shape)
        return pad_sequence(rows, batch_first=True).to(self.device)

    def _encode_text(
        self, text: str, length: int, *images: Image.Image
    ) -> tuple[torch.Tensor, ...]:
        """Features (L, D) of one text and, where the model uses them, pooled ones (P,).

        L is at most ``length``.
        """
        seen = {"image": list(images)} if images else {}
        embeds, *_ = self.pipeline.encode_prompt(
            text, device=self._encoder_device, max_sequence_length=length, **seen
        )
        return (embeds[0],)

    @property
    def _encoder_device(self) -> torch.device:
        return self.text_encoders()[0].device

    def _embedded_guidance(self, sigma: torch.Tensor) -> torch.Tensor | None:
        """The scale (B,) for a transformer that takes it as an input; None for others."""
        if not self._transformer_config.guidance_embeds:
            return None
        return torch.full_like(sigma, self.guidance_scale)

    @override
    def velocity(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        height: int,
        width: int,
        guided: bool = True,
    ) -> torch.Tensor:
        inputs = ForwardInputs(latents, sigma, conditioning, height, width)
        generated = slice(latents.shape[1])  # tokens of reference images come after them
        with self.autocast():
            conditional = self._forward(inputs)[:, generated].float()
            if not (self.uses_true_cfg and guided):
                return conditional
            negative = self._forward(replace(inputs, negative=True))[:, generated].float()
        return self._combined(conditional, negative)

    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """u + scale·(c − u)."""
        return negative + self.guidance_scale * (conditional - negative)

    @abstractmethod
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """The velocity (B, M, C) in any precision, whose first L tokens are the generated ones."""

    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Image tokens (B, M, C), the generated ones first, and the grid of each image.

        A grid is its rows and columns of tokens: of the generated image, then of each reference.
        """
        return inputs.latents, [self._grid(inputs.height, inputs.width)]

    def _pixels(self, unpacked: torch.Tensor) -> torch.Tensor:
        """The VAE's pixels (B, 3, H, W) in about [-1, 1] of latents that the pipeline unpacked."""
        vae = self.pipeline.vae
        return vae.decode(
            unpacked / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False
        )[0]

    @override
    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """linspace(1, 1/num_steps, num_steps) or the scheduler's own σ, shifted by it."""
        rows, columns = self._grid(height, width)
        linear = {}
        if self.linear_sigmas:
            linear = {"sigmas": self._unshifted_sigmas(num_steps)}
        retrieve_timesteps(
            self._scheduler, num_steps, mu=self._mu(rows * columns, num_steps), **linear
        )
        return self._scheduler.sigmas.to("cpu", torch.float32)

    def _unshifted_sigmas(self, num_steps: int) -> np.ndarray:
        """What the pipeline shifts, (num_steps,)."""
        return np.linspace(1.0, 1 / num_steps, num_steps)

    def _mu(self, tokens: int, num_steps: int) -> float:
        """Shift of a dynamic schedule; for FLUX.1 it is linear in the generated tokens."""
        config = self._scheduler.config
        return calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )

    @override
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        """The same noise as the pipeline's with CPU generators of these seeds."""
        shape = self._noise_shape(*self._grid(height, width))
        noise = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(int(seed))
            noise.append(torch.randn(shape, generator=generator))
        return to_device(self._pack(torch.stack(noise)), self.device)

    def _noise_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents that the pipeline draws."""
        return self._transformer_config.in_channels // 4, 2 * rows, 2 * columns

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, c, h, w), of a video VAE (B, c, 1, h, w), as tokens (B, L, C)."""
        batch, channels, *_, height, width = latents.shape
        return self.pipeline._pack_latents(latents, batch, channels, height, width)

    def _unpack(self, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The opposite of ``_pack``, for images of ``height`` x ``width``."""
        return self.pipeline._unpack_latents(tokens, height, width, self.pipeline.vae_scale_factor)

    @torch.no_grad()
    @override
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        """With the same bits as diffusers' images; pixels become bytes on the device."""
        unpacked = self._unpack(latents, height, width)
        with self._offloaded_vae.on_device():
            pixels = self._pixels(unpacked.to(self.pipeline.vae.device, self.pipeline.vae.dtype))
        scaled = self.pipeline.image_processor.postprocess(pixels, output_type="pt").float() * 255
        rounded = scaled.round().permute(0, 2, 3, 1)
        as_bytes = rounded.to(torch.uint8, memory_format=torch.contiguous_format)
        return [Image.fromarray(array) for array in as_bytes.cpu().numpy()]

    @override
    def offload(self, text_encoders: bool | None, vae: bool) -> None:
        if text_encoders is None:
            on_gpu = self.device.type == "cuda"
            text_encoders = on_gpu and not fits_beside_training(self.text_encoders(), self.device)
        self.offloads_text_encoders = text_encoders
        self._offloaded_text = self._between_uses(self.text_encoders(), text_encoders)
        self._offloaded_vae = self._between_uses([self.pipeline.vae], vae)

    def _between_uses(self, modules: Sequence[nn.Module], offloaded: bool) -> Offloaded:
        """Offload ``modules``, or else move them to the device: then nothing is offloaded."""
        if offloaded:
            return Offloaded(modules, self.device)
        for module in modules:
            module.to(self.device)
        return Offloaded((), self.device)

    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        """Arguments of the plain pipeline for this policy's images of ``item``.

        The item has the size of the generated image.
        """
        return {
            "prompt": item.prompt,
            **self.length_arguments(item.height, item.width),
            **self.guidance_arguments(),
        }

    def length_arguments(self, height: int, width: int) -> dict[str, int]:
        """Those of ``pipeline_arguments`` that set lengths, where the pipeline takes them."""
        lengths = {
            "height": height,
            "width": width,
            "max_sequence_length": self.max_sequence_length,
        }
        accepted = inspect.signature(self.pipeline_class.__call__).parameters
        return {name: length for name, length in lengths.items() if name in accepted}

    def guidance_arguments(self) -> dict[str, object]:
        """Those of ``pipeline_arguments`` that set the guidance."""
        return {"guidance_scale": self.guidance_scale}

    @contextmanager
    def whole_pipeline(self, item: Item) -> Iterator[DiffusionPipeline]:
        """The plain pipeline, ready for ``pipeline_arguments`` of ``item``, inside the block."""
        with self._offloaded_text.on_device(), self._offloaded_vae.on_device():
            yield self.pipeline

    def noise_arguments(self, seed: int, item: Item) -> dict[str, Any]:
        """Arguments of the plain pipeline for the noise of ``seed``."""
        noise = self.initial_latents([seed], *item.size)
        return {"latents": self.pipeline_latents(noise, item)}

    def pipeline_latents(self, latents: torch.Tensor, item: Item) -> torch.Tensor:
        """``latents`` (B, L, C) as the pipeline takes them."""
        return latents

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of latent tokens."""
        if height % self.size_multiple or width % self.size_multiple:
            raise ValueError(
                f"image size {height}x{width} is not a multiple of {self.size_multiple}: use "
                "round_size"
            )
        return height // self.size_multiple, width // self.size_multiple


class FlatLatents(DiffusersPolicy):
    """A pipeline whose transformer takes latents (B, C, h, w); our tokens are their cells."""

    @override
    def _noise_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return self._transformer_config.in_channels, 2 * rows, 2 * columns

    @override
    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.flatten(2).transpose(1, 2)

    @override
    def _unpack(self, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return tokens.transpose(1, 2).unflatten(
            2, self._noise_shape(*self._grid(height, width))[1:]
        )

    @override
    def pipeline_latents(self, latents: torch.Tensor, item: Item) -> torch.Tensor:
        return self._unpack(latents, item.height, item.width)


def image_digest(image: Image.Image) -> tuple[bytes, tuple[int, int]]:
    """What identifies the picture, for caches."""
    return hashlib.blake2b(image.tobytes(), digest_size=16).digest(), image.size


def on_white(image: Image.Image) -> Image.Image:
    """``image`` as RGB, over white where it is transparent."""
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
