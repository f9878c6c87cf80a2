"""The interface of a generator: all that sampling and objectives know about a model.

Checkpoints, model cards, the check of a saved adapter and estimates also use the pipeline itself.
So the classes in ``loading.POLICIES`` are subclasses of ``diffusers_policy.DiffusersPolicy``.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerBase

from paco_grpo.types import Conditioning, Item
from paco_judge.errors import UserError


class PolicyLoadError(UserError):
    """A model could not be loaded; the message names it and says what to do."""


@dataclass(frozen=True)
class PolicySettings:
    """How a generator is loaded, and its guidance."""

    # Computing precision of the transformer and the text encoders; the VAE stays float32.
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    max_sequence_length: int = 512  # text tokens, 1 to ``Policy.text_limit``; see ``encode``
    guidance_scale: float = 3.5  # embedded guidance or scale of true CFG, depending on the model
    negative_prompt: str | None = None  # of true CFG
    quantize: str | None = None  # nf4: the frozen transformer in 4 bits


class Policy(ABC):
    """A flow-matching generator with a trainable transformer.

    σ lies in [0, 1] (1 = noise); only the policy knows the units of its transformer. Every forward
    of the transformer goes through ``velocity``, which applies the policy's autocast, so rollout
    and training compute the same numbers.
    """

    # Suffixes of modules in ``transformer`` (docs/method.md §6)
    lora_targets: tuple[str, ...] = ()
    edits_images: ClassVar[bool] = False  # an item may have a reference image
    needs_image: ClassVar[bool] = False  # an item must have a reference image
    several_images: ClassVar[bool] = False  # an item may have more than one
    has_true_cfg: ClassVar[bool] = False  # it can use a negative prompt
    keeps_attention: ClassVar[bool] = False  # training uses the attention that diffusers chooses
    text_limit: ClassVar[int] = 512  # maximum number of text tokens
    cuts_text: ClassVar[bool] = True  # longer texts are cut there
    tokenizer_folder: ClassVar[str] = "tokenizer"  # whose tokens max_sequence_length counts

    uses_true_cfg: bool = False  # two forwards a step; not FLUX's embedded guidance
    # ``encode`` copies the text encoders to the device: encode many items at a time.
    offloads_text_encoders: bool = False
    transformer: nn.Module  # compiled or sharded in place (FSDP2), never wrapped
    size_multiple: int  # heights and widths are multiples of this many pixels
    device: torch.device  # where the transformer computes
    dtype: torch.dtype  # its computing precision; latents are always float32

    @classmethod
    @abstractmethod
    def from_pretrained(cls, path: str | Path, settings: PolicySettings) -> Self:
        """Load a diffusers pipeline folder (or hub name), frozen and in evaluation mode."""

    @abstractmethod
    def encode(self, items: Sequence[Item], text_tokens: int | None = None) -> Conditioning:
        """Conditioning of ``items`` on ``device``, one row each.

        A row does not depend on the other items.

        Args:
            items: ``height`` and ``width`` are the size of the generated image.
            text_tokens: Length to which texts are cut and, in models that attend to padding, padded.
                None: ``PolicySettings.max_sequence_length``.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """Schedule (num_steps + 1,) float32 on the CPU, from 1 down to exactly 0.

        It has the model's own shift.
        """

    @abstractmethod
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        """Gaussian noise (B, L, C) float32 on ``device``.

        Row b depends only on ``seeds[b]`` and the size.
        """

    @abstractmethod
    def velocity(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        height: int,
        width: int,
        guided: bool = True,
    ) -> torch.Tensor:
        """Predicted v = noise − x_0.

        Args:
            latents: x_σ (B, L, C) float32.
            sigma: (B,) float32 in [0, 1].
            conditioning: len B.
            height, width: Pixels, multiples of ``size_multiple``.
            guided: Whether true CFG is applied, if the policy was loaded with it.

        Returns:
            (B, L, C) float32.
        """

    @abstractmethod
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        """Images of clean latents (B, L, C) float32, each ``height`` x ``width`` RGB."""

    def offload(self, text_encoders: bool | None, vae: bool) -> None:
        """Keep these in main memory (True) or on ``device`` (False) between uses.

        A policy may ignore it. None: on a GPU that keeps half of its memory free with them. Call it
        when the transformer is on the device.
        """

    def autocast(self) -> AbstractContextManager[object]:
        """Around every transformer forward."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def keeping_prefix(self) -> AbstractContextManager[None]:
        """Around forwards of the same weights and conditioning, without gradient.

        A policy may keep what it computed of text and references for later forwards: the results
        are equal up to rounding.
        """
        return nullcontext()

    @classmethod
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """``prompt`` with what the pipeline puts around it.

        It is what ``tokenizer`` sees and ``max_sequence_length`` counts.
        """
        return prompt

    @classmethod
    def count_tokens(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
        """Tokens of ``prompt`` that ``max_sequence_length`` counts."""
        return len(tokenizer(cls.in_template(tokenizer, prompt), verbose=False).input_ids)

    @classmethod
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """``size_multiple`` by the VAE's configuration.

        Its levels halve the sides, and 2x2 latents are a token.
        """
        return 2 * 2 ** (len(vae["block_out_channels"]) - 1)

    def batch_key(self, item: Item) -> Hashable:
        """Samples may share a forward if their items have equal keys.

        The items have the size of the generated image.
        """
        return item.height, item.width

    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """Height and width of an edited image, with about the area ``resolution``².

        ``item`` gives the shape, or else its first image does.
        """
        raise NotImplementedError(f"{type(self).__name__} edits no images")

    def round_size(self, height: int, width: int) -> tuple[int, int]:
        """Both sides rounded down to a multiple of ``size_multiple``, as the pipelines do."""
        multiple = self.size_multiple
        if min(height, width) < multiple:
            raise ValueError(
                f"image size {height}x{width} is too small: both sides need at least {multiple} "
                "pixels"
            )
        return height // multiple * multiple, width // multiple * multiple
