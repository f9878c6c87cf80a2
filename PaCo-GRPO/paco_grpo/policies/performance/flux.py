"""FLUX's transformer with less work for the same numbers, at diffusers' seams: attention processors and hooks.

* Text tokens have position 0, where a rotation is the identity, so only image tokens are rotated.
* Nothing reads the text tokens behind the last block, so that block computes them only as keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import nn

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin (M, D) of the last M tokens


def leave_out_unused_work(transformer: FluxTransformer2DModel) -> None:
    """Install the processors and hooks of this module; weights and their names do not change."""
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.attn.set_processor(JointAttention())
    if len(transformer.single_transformer_blocks):
        _LastBlock(transformer)


class JointAttention:
    """Attention over text and image tokens. ``image_rotary_emb`` may have rows for the image tokens alone."""

    _attention_backend = None  # both are set by diffusers
    _parallel_config = None

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotation | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Image and text tokens (B, M, C) and (B, L, C) apart, or (B, L + M, C) without ``encoder_hidden_states``."""
        attended = self._attended(hidden_states) if encoder_hidden_states is None else hidden_states
        q = attn.norm_q(self._heads(attn, attn.to_q(hidden_states)))
        k, v = attn.norm_k(self._heads(attn, attn.to_k(attended))), self._heads(attn, attn.to_v(attended))
        if encoder_hidden_states is None:
            return self._attend(_rotate(q, image_rotary_emb), _rotate(k, image_rotary_emb), v, attention_mask)
        projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        text_q, text_k, text_v = (self._heads(attn, project(encoder_hidden_states)) for project in projections)
        text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
        length = encoder_hidden_states.shape[1]
        if image_rotary_emb is not None and len(image_rotary_emb[0]) > q.shape[1]:
            q, k = (_rotate(torch.cat(parts, dim=1), image_rotary_emb) for parts in ((text_q, q), (text_k, k)))
        else:
            q, k = _rotate(q, image_rotary_emb).to(v.dtype), _rotate(k, image_rotary_emb).to(v.dtype)
            q, k = torch.cat([text_q.to(v.dtype), q], dim=1), torch.cat([text_k.to(v.dtype), k], dim=1)
        out = self._attend(q, k, torch.cat([text_v, v], dim=1), attention_mask)
        text, image = out.split([length, out.shape[1] - length], dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text.contiguous())

    def _attended(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tokens whose keys and values a block of one stream attends to."""
        return hidden_states

    @staticmethod
    def _heads(attn: FluxAttention, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, attn.head_dim))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Autocast leaves the norms of q and k in float32 and would cast them here, but for some attention backends.
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3)


class _LastBlock(JointAttention):
    """Processor and hooks of the last block, which then sees image tokens only; text tokens reach its keys and values."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self._transformer = [transformer]
        self._text: torch.Tensor | None = None  # (B, L, C), from the block's input until its norm
        self._all: torch.Tensor | None = None  # (B, L + M, C), from the norm until the attention
        block = transformer.single_transformer_blocks[-1]
        block.attn.set_processor(self)
        block.register_forward_pre_hook(self._take_text, with_kwargs=True)
        block.norm.register_forward_pre_hook(self._add_text)
        block.norm.register_forward_hook(self._split)

    def _take_text(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        # A first-block cache compares the text tokens behind this block with those before the others.
        if self._transformer[0].is_cache_enabled:
            self._text = None
            return None
        if "encoder_hidden_states" in kwargs:
            self._text = kwargs["encoder_hidden_states"]
            return args, kwargs | {"encoder_hidden_states": self._text[:, :0]}
        self._text = args[1]  # gradient checkpointing passes everything by position
        return (args[0], self._text[:, :0], *args[2:]), kwargs

    def _add_text(self, norm: nn.Module, args: tuple) -> tuple | None:
        return None if self._text is None else (torch.cat([self._text, args[0]], dim=1), *args[1:])

    def _split(self, norm: nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> tuple | None:
        if self._text is None:
            return None
        self._all, gate = output
        length, self._text = self._text.shape[1], None
        return self._all[:, length:].contiguous(), gate  # linear layers compute others in two steps

    def _attended(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` (B, M, C) are the image tokens alone."""
        everything, self._all = (hidden_states if self._all is None else self._all), None
        return everything


def _rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """``x`` (B, N, heads, D), made by the caller, with its last tokens rotated by as many rows as ``rotation`` has."""
    if rotation is None:
        return x
    rows, tokens = len(rotation[0]), x.shape[1]
    if rows >= tokens:
        return apply_rotary_emb(x, tuple(part[rows - tokens :] for part in rotation), sequence_dim=1)
    text, image = x.split([tokens - rows, rows], dim=1)
    image = apply_rotary_emb(image, rotation, sequence_dim=1)
    if torch.is_grad_enabled():
        return torch.cat([text, image], dim=1)
    x[:, tokens - rows :] = image
    return x
