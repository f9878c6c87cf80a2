"""Quality of the built weights: images drawn by diffusers' own pipelines, measured by the oracle."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image

from paco_toy.edit_oracle import judge_edits
from paco_toy.edits import draw_scene, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import ATTRIBUTES, CHARACTERS, OPENINGS, VIEWS, Character, grid_prompt, opened, random_jitter
from toy_models.kontext import GUIDANCE, TEXT_TOKENS
from toy_models.panels import random_views

logger = logging.getLogger(__name__)
STEPS = 10  # of denoising


def generator_quality(folder: Path, seed: int, count: int = 192, sizes: tuple[int, ...] = (32, 64, 128)) -> dict:
    """Oracle means for ``count`` full and as many open prompts: {"64px": {"consistency": …, "open": {"agreement": …}}, …}."""
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng([seed, 40])
    full = [CHARACTERS[c] for c in rng.permutation(np.arange(count) % len(CHARACTERS))]
    views = random_views(count, rng)
    half_open = [opened(character, OPENINGS[number % len(OPENINGS)]) for number, character in enumerate(full)]
    quality = {}
    for size in sizes:
        reading = read_grids(_draw_grids(pipe, full, views, seed, size))
        measures = {
            "consistency": reading.consistency(), "valid": reading.valid, "alignment": reading.alignment(full),
            "view": reading.view_following(views), "distinct": reading.distinctness(),
        }  # fmt: skip
        quality[f"{size}px"] = _means(f"full prompts at {size}px", measures)
        reading = read_grids(_draw_grids(pipe, half_open, views, seed, size))
        measures = {
            "agreement": reading.agreement(half_open), "choice": np.array([reading.choice(half_open, name) for name in ATTRIBUTES]),
            "consistency": reading.consistency(), "valid": reading.valid, "alignment": reading.alignment(half_open),
            "view": reading.view_following(views),
        }  # fmt: skip
        quality[f"{size}px"]["open"] = _means(f"open prompts at {size}px", measures)
    return quality


def _draw_grids(
    pipe: FluxPipeline, named: list[Character], views: np.ndarray, seed: int, size: int
) -> list[Image.Image]:
    prompts = [grid_prompt(character, [VIEWS[i] for i in v]) for character, v in zip(named, views, strict=True)]
    images = []
    for start in range(0, len(prompts), 48):
        batch = prompts[start : start + 48]
        generators = [torch.Generator().manual_seed(seed * 100003 + start + i) for i in range(len(batch))]
        images += pipe(
            batch, height=size, width=size, num_inference_steps=STEPS, guidance_scale=3.5, generator=generators,
            max_sequence_length=pipe.tokenizer_2.model_max_length,
        ).images  # fmt: skip
    return images


def editor_quality(pipe: FluxKontextPipeline, seed: int, count: int = 192, sizes: tuple[int, ...] = (64, 128)) -> dict:
    """Oracle means for ``count`` edits over all characters: {"64px": {"edit": …, "followed": …, …}, …}.

    ``edit`` is sqrt(followed · kept), ``valid`` the share of valid panels.
    """
    everything, quality = range(len(CHARACTERS)), {}
    pipe.set_progress_bar_config(disable=True)
    for size in sizes:
        rng = np.random.default_rng([seed, 41])
        edits = [random_edit(rng, everything, everything) for _ in range(count)]
        references = [draw_scene(e.characters, e.views, size, [random_jitter(rng) for _ in range(4)]) for e in edits]
        images = []
        for start in range(0, count, 32):
            batch = slice(start, start + 32)
            generators = [torch.Generator().manual_seed(seed * 100003 + i) for i in range(count)[batch]]
            images += pipe(
                image=references[batch], prompt=[edit.instruction for edit in edits[batch]], height=size, width=size,
                max_area=size * size, guidance_scale=GUIDANCE, num_inference_steps=STEPS, generator=generators,
                max_sequence_length=TEXT_TOKENS, _auto_resize=False,
            ).images  # fmt: skip
        followed, kept = judge_edits(images, edits)
        measures = {
            "edit": np.sqrt(followed * kept),
            "followed": followed,
            "kept": kept,
            "valid": read_grids(images).valid,
        }
        quality[f"{size}px"] = _means(f"edits at {size}px", measures)
    return quality


def _means(label: str, measures: dict[str, np.ndarray]) -> dict[str, float]:
    means = {name: float(values.mean()) for name, values in measures.items()}
    logger.info("%s: %s", label, " ".join(f"{name} {value:.3f}" for name, value in means.items()))
    return means
