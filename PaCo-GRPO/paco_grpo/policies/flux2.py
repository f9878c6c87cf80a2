"""FLUX.2-dev and FLUX.2 Klein: text to image, and edits with any number of reference images."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu, format_input
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from PIL import Image, ImageOps
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from paco_grpo.policies.base import PolicyLoadError, PolicySettings
from paco_grpo.policies.diffusers_policy import FlatLatents, ForwardInputs, lora_targets_with
from paco_grpo.policies.reference_image import ReferenceImagePolicy
from paco_grpo.policies.true_cfg import TrueCfgPolicy
from paco_grpo.types import Item

_MEGAPIXEL = 1024**2  # the pipelines scale larger reference images down to this area


class Flux2Policy(FlatLatents, ReferenceImagePolicy):
    """FLUX.2-dev and everything saved as a ``Flux2Pipeline``; its guidance is embedded.

    A reference image that has the generated image's shape gets its size: it is scaled until it
    covers that, and what is left over is cut. Others are never enlarged: a larger one is scaled
    down to the area of the generated image (the pipelines: to a megapixel), and its edges are cut
    to whole tokens.
    """

    pipeline_class = Flux2Pipeline
    family = "FLUX.2"
    needs_image = False
    several_images = True
    largest_reference = _MEGAPIXEL
    # The output layer is ``attn.to_out`` in single blocks and ``attn.to_out.0`` in double blocks.
    lora_targets = (
        *lora_targets_with("ff", "ff_context", layers=("linear_in", "linear_out")),
        "attn.to_qkv_mlp_proj",
        "attn.to_out",
    )

    @classmethod
    @override
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """With the pipeline's system message."""
        (messages,) = format_input([prompt], SYSTEM_MESSAGE)
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Mistral, or Qwen3 (Klein)."""
        return (self.pipeline.text_encoder,)

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        embeds, _, _ = inputs.text  # padding is attended to
        text_ids, image_ids = self._ids_for(embeds.shape[1], *grids)
        return self.transformer(
            # float32: the transformer casts 1000·σ to their type, which bfloat16 would round
            hidden_states=tokens,
            timestep=inputs.sigma,
            guidance=self._embedded_guidance(inputs.sigma),
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    def _ids_for(self, length: int, *grids: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (image, row, column, text token) of text (L, 4) and all images (M, 4)."""
        key = (length, *grids)
        if key not in self._ids:
            text = self.pipeline._prepare_text_ids(torch.empty(1, length, 1))[0]
            generated, *references = (torch.empty(1, 1, *grid) for grid in grids)
            images = [self.pipeline._prepare_latent_ids(generated)[0]]
            images += [self.pipeline._prepare_image_ids(references)[0]] if references else []
            self._ids[key] = text.to(self.device), torch.cat(images).to(self.device)
        return self._ids[key]

    @override
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """Both sides down to the multiple, at least one, as the pipelines size reference images."""
        return self._whole(math.sqrt(area / aspect)), self._whole(math.sqrt(area * aspect))

    @override
    def reference_size(self, image: Image.Image, item: Item) -> tuple[int, int]:
        """Another shape is at most scaled down; then both sides are cut to whole tokens."""
        if self.has_its_shape(image, item):
            return item.height, item.width
        width, height = self._scaled(image, item)
        return self._whole(height), self._whole(width)

    def _scaled(self, image: Image.Image, item: Item) -> tuple[int, int]:
        """Width and height of ``image`` before its edges are cut."""
        area = min(_MEGAPIXEL, (item.height or math.inf) * (item.width or math.inf))
        scale = min(1.0, math.sqrt(area / (image.width * image.height)))
        return int(image.width * scale), int(image.height * scale)

    @override
    def _resize(self, image: Image.Image, item: Item) -> Image.Image:
        height, width = self.reference_size(image, item)
        if self.has_its_shape(image, item):
            return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
        scaled = self._scaled(image, item)
        if min(scaled) < self.size_multiple:
            raise ValueError(
                f"a reference image of item {item.item_id} has {image.width}x{image.height} "
                "pixels: its sides must be at "
                f"least {self.size_multiple} after it is scaled down (config.train.resolution)"
            )
        small = image if scaled == image.size else image.resize(scaled, Image.Resampling.LANCZOS)
        return self.pipeline.image_processor._resize_and_crop(small, width=width, height=height)

    @override
    def _mu(self, tokens: int, num_steps: int) -> float:
        return compute_empirical_mu(tokens, num_steps)

    @override
    def _noise_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return (
            self._transformer_config.in_channels,
            rows,
            columns,
        )  # 2x2 latents are the channels of a token

    @override
    def _pixels(self, unpacked: torch.Tensor) -> torch.Tensor:
        """Latents are normalized with the running statistics of the VAE's batch norm."""
        vae = self.pipeline.vae
        mean = vae.bn.running_mean.view(1, -1, 1, 1)
        variance = vae.bn.running_var.view(1, -1, 1, 1)
        latents = unpacked * torch.sqrt(variance + vae.config.batch_norm_eps) + mean
        return vae.decode(self.pipeline._unpatchify_latents(latents), return_dict=False)[0]


class Flux2KleinPolicy(TrueCfgPolicy, Flux2Policy):
    """FLUX.2 Klein (4B, 9B) and everything saved as a ``Flux2KleinPipeline``.

    True CFG is on if ``guidance_scale`` > 1, against an empty prompt unless ``negative_prompt``
    says otherwise.
    """

    pipeline_class = Flux2KleinPipeline
    family = "FLUX.2 Klein"
    default_negative = ""

    @override
    def guidance_arguments(self) -> dict[str, object]:
        """With the negative prompt's features: the pipeline takes no text."""
        arguments: dict[str, object] = {"guidance_scale": self.guidance_scale}
        if self.uses_true_cfg and self.negative_prompt != self.default_negative:
            (features,) = self._encode_text(self.negative_prompt, self.max_sequence_length)
            arguments["negative_prompt_embeds"] = features[None]
        return arguments

    @classmethod
    @override
    def from_pretrained(cls, path: str | Path, settings: PolicySettings) -> Self:
        """Raises PolicyLoadError: a model distilled to four steps takes no guidance."""
        scale = settings.guidance_scale
        if scale > 1 and cls.pipeline_class.load_config(path).get("is_distilled"):
            raise PolicyLoadError(
                f"config.sample.guidance_scale={scale:g}, but {path} is distilled to work without: "
                "set it to 1, or train the base model, such as "
                "black-forest-labs/FLUX.2-klein-base-4B"
            )
        return super().from_pretrained(path, settings)

    @classmethod
    @override
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """With an empty thought."""
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
