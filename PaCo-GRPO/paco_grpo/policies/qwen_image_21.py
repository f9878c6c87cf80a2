"""Qwen-Image-2.1: text to image, and edits with several references, in one causal sequence."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, QwenImage21Pipeline
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from PIL import Image
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.diffusers_policy import ForwardInputs, on_white
from paco_grpo.policies.qwen_image_edit import QwenImageEditPolicy
from paco_grpo.policies.reference_image import Reference
from paco_grpo.policies.true_cfg import TrueCfgPolicy
from paco_grpo.types import Item


class QwenImage21Policy(QwenImageEditPolicy):
    """Qwen-Image-2.1 and everything saved as a ``QwenImage21Pipeline``.

    It is meant to be used without guidance; true CFG is on if ``negative_prompt`` is set and
    ``guidance_scale`` > 1. Text and references do not depend on σ or the generated image. Inside
    ``keeping_prefix``, their keys and values are computed once. The position of the image depends
    on the length of the text, so only texts of one length share a forward. Images are composited
    over white.
    """

    pipeline_class = QwenImage21Pipeline
    family = "Qwen-Image-2.1"
    tokenizer_folder = "processor"
    needs_image = False
    keeps_attention = True
    several_images = True
    shape_from = -1
    card_setup = ""  # the pipeline itself gives image tokens their rows and columns
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "img_mlp.proj",
        "img_mlp.gate_layer",
        "img_mlp.out",
    )

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        # By whether the prompt is the negative one; None: outside of ``keeping_prefix``.
        self._prefixes: dict[bool, QwenImage21KVCache] | None = None

    @classmethod
    @override
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """Sides are an even number of tokens, and a token is a latent."""
        return 2 * 2 ** (len(vae["dim_mult"]) - 1)

    @override
    def batch_key(self, item: Item) -> Hashable:
        """Also the length of the text."""
        length = self.count_tokens(self.pipeline.processor.tokenizer, item.prompt)
        return length, super().batch_key(item)

    @contextmanager
    @override
    def keeping_prefix(self) -> Iterator[None]:
        is_causal = self._transformer_config.causal_condition
        self._prefixes = {} if is_causal else None
        try:
            yield
        finally:
            self._prefixes = None

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        arguments = super().pipeline_arguments(item)
        return arguments | {"image": arguments["image"] or None}

    @override
    def _encode_text(
        self, text: str, length: int, *images: Image.Image
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of text and references, and which of them (L,) stand for references.

        The pipeline cuts no text.
        """
        del length
        embeds, _, slots = self.pipeline.encode_prompt(
            text, image=list(images) or None, device=self._encoder_device
        )
        return embeds[0], slots[0]

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        count = inputs.latents.shape[1]
        tokens = torch.cat([tokens[:, count:], tokens[:, :count]], dim=1)  # the generated ones last
        embeds, mask, slots = inputs.text
        if mask is not None:
            lengths = set(mask.sum(dim=1).tolist())
            if len(lengths) > 1:
                raise ValueError(
                    f"texts of {sorted(lengths)} tokens cannot share a forward: group samples by "
                    "policy.batch_key"
                )
            embeds = embeds[:, : lengths.pop()]
            slots = slots[:, : embeds.shape[1]]
        # The encoder's slot stands for 2x2 tokens of an image.
        generated = slots.new_ones(len(slots), count // 4)
        velocity = self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            encoder_hidden_states=embeds,
            img_shapes=[[(1, *grid) for grid in [*grids[1:], grids[0]]]] * len(tokens),
            img_mask=torch.cat([slots, generated], dim=1).bool(),
            return_dict=False,
            **self._prefix(inputs.negative),
        )[0]
        return velocity[:, -count:]

    def _prefix(self, negative: bool) -> dict[str, Any]:
        """Arguments that store keys and values of text and references, or use the stored ones."""
        if self._prefixes is None:
            return {}
        if negative in self._prefixes:
            return {"kv_cache": self._prefixes[negative], "kv_cache_mode": "cached"}
        self._prefixes[negative] = QwenImage21KVCache(self._transformer_config.num_layers)
        return {"kv_cache": self._prefixes[negative], "kv_cache_mode": "extract"}

    @override
    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        return TrueCfgPolicy._combined(self, conditional, negative)

    @override
    def _unshifted_sigmas(self, num_steps: int) -> np.ndarray:
        """Turbo's own."""
        own = self.pipeline.config.sample_sigmas
        if own is None:
            return super()._unshifted_sigmas(num_steps)
        if len(own) != num_steps:
            raise ValueError(f"num_steps = {num_steps}: the model's schedule has {len(own)} steps")
        return np.array(own)

    @override
    def _grid(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = super()._grid(height, width)
        return 2 * rows, 2 * columns

    @override
    def _noise_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return self._transformer_config.in_channels, rows, columns

    @override
    def _encode_image(self, reference: Reference) -> torch.Tensor:
        with_alpha = Reference(reference.image.convert("RGBA"), reference.original)
        return super()._encode_image(with_alpha)

    @override
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        """The VAE's images are RGBA; these are on white."""
        return [on_white(image) for image in super().decode(latents, height, width)]
