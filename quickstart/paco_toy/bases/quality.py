"""What a generator folder draws, measured by the oracle through diffusers' FluxPipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline

from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS, VIEWS, grid_prompt


def generator_quality(
    folder: Path, seed: int, count: int = 192, sizes: tuple[int, ...] = (32, 64, 128), steps: int = 10
) -> dict:
    """Oracle means for `count` prompts over all characters: {"64px": {"consistency": …, "valid": …, …}, …}."""
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng([seed, 40])
    characters = rng.permutation(np.arange(count) % len(CHARACTERS))
    views = rng.random((count, len(VIEWS))).argsort(axis=1)[:, :4]
    prompts = [grid_prompt(CHARACTERS[c], [VIEWS[i] for i in v]) for c, v in zip(characters, views)]
    quality = {}
    for size in sizes:
        images = []
        for start in range(0, count, 48):
            batch = prompts[start : start + 48]
            generators = [torch.Generator().manual_seed(seed * 100003 + start + i) for i in range(len(batch))]
            images += pipe(
                batch, height=size, width=size, num_inference_steps=steps, guidance_scale=3.5, generator=generators,
                max_sequence_length=pipe.tokenizer_2.model_max_length,
            ).images  # fmt: skip
        reading = read_grids(images)
        quality[f"{size}px"] = {
            "consistency": float(reading.consistency().mean()),
            "valid": float(reading.valid.mean()),
            "alignment": float(reading.alignment(characters).mean()),
            "view": float(reading.view_following(views).mean()),
            "distinct": float(reading.distinctness().mean()),
        }
    return quality
