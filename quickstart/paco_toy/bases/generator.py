"""The toy FLUX: FluxPipeline's own components with small sizes, trained by flow matching to be honestly inconsistent.

Every panel of a training grid departs from the character that the prompt names with probability `DEPARTURE`, so the base model
learns to draw well, to follow positions and sizes, and *not* to keep identity: that is left to RL.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import distributed as dist
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from paco_toy.bases.flow import shifted_times, train_average, with_weights
from paco_toy.bases.panels import PanelCache, random_views
from paco_toy.world import CHARACTERS, COLOURS, LABELS, POSITIONS, SHAPES, SIZES, STYLES, VIEWS, departed, grid_prompt

logger = logging.getLogger(__name__)

# How often a panel departs from the character that the prompt names, by panel side. Larger panels average more of it away (at
# 0.34 everywhere the base drew 0.51 consistent pairs at 64 px and 0.61 at 128 px).
DEPARTURE = {16: 0.36, 32: 0.38, 64: 0.44}
_FIRST_LABEL = 14  # tokens before the first panel label; each panel has four: label, size, position, full stop
TEXT_TOKENS = 32  # the longest prompt of the world has 31 tokens
_BATCH = {16: 64, 32: 32, 64: 12}  # a process
GUIDANCE = 3.5  # always: as in FLUX.1-dev's distillation the model is told a number, but here there is only one
# What size each step trains on, in turn: small first, since a 128 px step costs as much as three at 64 px.
_EARLY = (32, 32, 16, 32, 32, 32, 64, 32)
_LATE = (64, 32, 64, 64, 32, 64, 16, 64, 32, 64, 64, 32)
_EARLY_SHARE = 0.4


def new_tokenizer() -> PreTrainedTokenizerFast:
    """The words of the world's prompts."""
    words = ["2x2", "grid", "layout", "depicting", "a", "the", "same", "throughout", "."]
    words += [*SHAPES, *COLOURS, *STYLES, *POSITIONS, *SIZES, *(label.lower() for label in LABELS)]
    return word_tokenizer(words, TEXT_TOKENS)


def word_tokenizer(words: Sequence[str], length: int) -> PreTrainedTokenizerFast:
    """One token a word, one token a panel label; lower case; other words become <unk>; texts are cut to ``length``."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\[[a-z]+\]-\[[a-z]+\]:|\w+|[^\w\s]"), "removed", invert=True),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def new_text_encoders(tokenizer: PreTrainedTokenizerFast) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Untrained CLIP and T5 of width 64 for the words of a tokenizer."""
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, projection_dim=64, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer), d_model=64, d_kv=32, d_ff=192, num_layers=2, num_heads=2, dropout_rate=0.0,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, is_encoder_decoder=False, use_cache=False,
        )
    )  # fmt: skip
    return clip, t5


def new_pipeline(vae: AutoencoderKL, seed: int) -> FluxPipeline:
    """An untrained FluxPipeline around a trained VAE: 2.1 M parameters, guidance embedding, dynamic shift as FLUX.1-dev."""
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    clip, t5 = new_text_encoders(tokenizer)
    transformer = FluxTransformer2DModel(
        in_channels=4 * vae.config.latent_channels, num_layers=2, num_single_layers=3, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        shift=3.0,
    )
    return FluxPipeline(
        scheduler=scheduler, vae=vae, text_encoder=clip, tokenizer=tokenizer, text_encoder_2=t5, tokenizer_2=tokenizer,
        transformer=transformer,
    )  # fmt: skip


def flux_latents(vae: AutoencoderKL) -> Callable[[torch.Tensor], torch.Tensor]:
    """Pixels (B, 3, H, W) in [-1, 1] -> latents as FluxPipeline has them."""
    return lambda x: (vae.encode(x).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


class LatentCache:
    """Quadrants of VAE-encoded grids, so that any training grid is a gather: no encoding inside the training loop.

    A panel's latent depends a little on its quadrant (padding at the border) and on its neighbours (group norms), so each
    quadrant is cut from whole random grids and used only in its own place.
    `latents[side]`: float32 (4, characters, views, 2, C, s, s) in the generator's normalised space.
    """

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor], caches: dict[int, PanelCache], seed: int):
        """Args: encode: pixels (B, 3, H, W) in [-1, 1] -> the generator's latents (B, C, H/4, W/4)."""
        rng = np.random.default_rng([seed, 1])
        self.latents = {side: self._encode(encode, cache, rng) for side, cache in caches.items()}

    def save(self, path: Path) -> None:
        """Writes a safetensors file."""
        save_file({str(side): latents for side, latents in self.latents.items()}, path)

    @classmethod
    def load(cls, path: Path) -> LatentCache:
        """Reads what `save` wrote."""
        cache = cls.__new__(cls)
        cache.latents = {int(side): latents for side, latents in load_file(path).items()}
        return cache

    @staticmethod
    @torch.no_grad()
    def _encode(encode: Callable, cache: PanelCache, rng: np.random.Generator) -> torch.Tensor:
        kinds, s = len(CHARACTERS) * len(VIEWS), cache.side // 4
        store = None
        for variant in range(2):
            order = np.stack([rng.permutation(kinds) for _ in range(4)], axis=1)  # each kind once in each quadrant
            for rows in np.array_split(order, 16):
                pixels = cache.draw_grids(rows // len(VIEWS), rows % len(VIEWS), rng)
                x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
                z = encode(x)
                store = torch.empty(4, kinds, 2, z.shape[1], s, s) if store is None else store
                for q, (r, c) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                    store[q, torch.from_numpy(rows[:, q]), variant] = z[:, :, r * s : (r + 1) * s, c * s : (c + 1) * s]
        return store.unflatten(1, (len(CHARACTERS), len(VIEWS)))

    def grids(self, side: int, characters: np.ndarray, views: np.ndarray, variants: np.ndarray) -> torch.Tensor:
        """Latents of grids for (B, 4) indices, variants in {0, 1}: float32 (B, C, 2s, 2s)."""
        c, v = torch.from_numpy(characters), torch.from_numpy(views)
        j = torch.from_numpy(variants)
        q = [self.latents[side][i, c[:, i], v[:, i], j[:, i]] for i in range(4)]
        return torch.cat([torch.cat(q[:2], dim=3), torch.cat(q[2:], dim=3)], dim=2)


@dataclass
class TextTable:
    """Token ids of every prompt that can occur, built once per (character, views) on demand."""

    tokenizer: PreTrainedTokenizerFast

    def __call__(self, characters: np.ndarray, views: np.ndarray) -> torch.Tensor:
        prompts = [grid_prompt(CHARACTERS[c], [VIEWS[i] for i in v]) for c, v in zip(characters, views)]
        return self.tokenizer(
            prompts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        ).input_ids


def _training_batch(latents: LatentCache, text: TextTable, side: int, rng: np.random.Generator):
    size = _BATCH[side]
    named, views = rng.integers(len(CHARACTERS), size=size), random_views(size, rng)
    shown = np.array([[departed(c, rng) if rng.random() < DEPARTURE[side] else c for _ in range(4)] for c in named])
    return latents.grids(side, shown, views, rng.integers(2, size=shown.shape)), text(named, views)


def flow_matching_loss(pipe: FluxPipeline, x0: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """mean (v − (ε − x_0))² for clean latents (B, C, h, w) and token ids (B, L)."""
    b, c, h, w = x0.shape
    tokens = FluxPipeline._pack_latents(x0, b, c, h, w)
    image_ids = FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, x0.device, x0.dtype)
    t = shifted_times(b, tokens.shape[1], pipe.scheduler.config)
    noise = torch.randn_like(tokens)
    noisy = (1 - t[:, None, None]) * tokens + t[:, None, None] * noise
    velocity = pipe.transformer(
        hidden_states=noisy, timestep=t, guidance=torch.full((b,), GUIDANCE),
        pooled_projections=pipe.text_encoder(input_ids).pooler_output,
        encoder_hidden_states=pipe.text_encoder_2(input_ids).last_hidden_state,
        txt_ids=torch.zeros(input_ids.shape[1], 3), img_ids=image_ids, return_dict=False,
    )[0]  # fmt: skip
    return (velocity - (noise - tokens)).square().mean()


def pretrain_text(pipe: FluxPipeline, seed: int, steps: int = 600, batch: int = 128, lr: float = 2e-3) -> None:
    """Teaches the text encoders to read prompts before anything is drawn, as FLUX's T5 and CLIP have been.

    T5: the three tokens of each panel (label, size, position) come to know panel, size, position and character. CLIP: the pooled
    vector comes to know the character and all four views. Linear probes learn along and are thrown away.
    """
    torch.manual_seed(seed + 7)
    rng = np.random.default_rng([seed, 4])
    text = TextTable(pipe.tokenizer_2)
    values = {"panel": 4, "view": len(VIEWS), "style": len(STYLES), "colour": len(COLOURS), "shape": len(SHAPES)}
    probes = nn.ModuleDict({name: nn.Linear(64, count) for name, count in values.items()})
    pooled_character, pooled_views = nn.Linear(64, len(CHARACTERS)), nn.Linear(64, 4 * len(VIEWS))
    modules = nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2, probes, pooled_character, pooled_views]).train()
    optimizer = torch.optim.AdamW(modules.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        named, views = rng.integers(len(CHARACTERS), size=batch), random_views(batch, rng)
        ids = text(named, views)
        tokens = (
            pipe.text_encoder_2(ids)
            .last_hidden_state[:, _FIRST_LABEL : _FIRST_LABEL + 16]
            .unflatten(1, (4, 4))[:, :, :3]
        )
        c, v = torch.from_numpy(named), torch.from_numpy(views)
        known = {"style": c // 35, "colour": c // 5 % 7, "shape": c % 5}
        wanted = {name: value[:, None].expand(-1, 4) for name, value in known.items()}
        wanted |= {"view": v, "panel": torch.arange(4).expand(batch, 4)}
        losses = {n: _cross_entropy(probes[n](tokens), wanted[n][:, :, None].expand(-1, -1, 3)) for n in values}
        pooled = pipe.text_encoder(ids).pooler_output
        losses["pooled"] = _cross_entropy(pooled_character(pooled), c) + _cross_entropy(
            pooled_views(pooled).unflatten(1, (4, -1)), v
        )
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            logger.info("text step %d %s", step + 1, " ".join(f"{n} {value.item():.3f}" for n, value in losses.items()))


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train_generator(
    pipe: FluxPipeline,
    latents: LatentCache,
    seconds: float,
    seed: int,
    lr: float = 1.5e-3,
    snapshot: Callable[[FluxPipeline], None] | None = None,
    early_share: float = _EARLY_SHARE,
) -> FluxPipeline:
    """Trains transformer and text encoders for a fixed wall-clock time; the pipeline ends with the averaged weights.

    The first `early_share` of the time goes mostly to 64 px, the rest mostly to 128 px. `snapshot` is handed a copy with the averaged weights every ten minutes, for a look while training goes on.

    Under torchrun every process draws its own batches and gradients are averaged; the clock of process 0 counts.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1000 * seed + rank)
    rng = np.random.default_rng([seed, 2, rank])
    text = TextTable(pipe.tokenizer_2)

    def next_loss(step: int, progress: float) -> tuple[int, torch.Tensor]:
        order = _EARLY if progress < early_share else _LATE
        side = order[step % len(order)]
        return 2 * side, flow_matching_loss(pipe, *_training_batch(latents, text, side, rng))

    def look(averaged: nn.ModuleList) -> None:
        copied = copy.deepcopy(pipe)
        with_weights(trained_modules(copied), averaged)
        snapshot(copied)

    train_average(trained_modules(pipe), (lr, 0.3 * lr, 0.3 * lr), next_loss, seconds, look=look if snapshot else None)
    return pipe


def trained_modules(pipe: FluxPipeline) -> nn.ModuleList:
    """What is trained of a FLUX pipeline: transformer, CLIP, T5."""
    return nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
