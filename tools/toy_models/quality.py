"""Quality of the built weights: images drawn by diffusers' own pipelines, measured by the oracle."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxKontextPipeline, FluxPipeline
from PIL import Image

from paco_toy.edits import draw_scene, judge_edits, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import ATTRIBUTES, CHARACTERS, OPENINGS, VIEWS, grid_prompt, opened, random_jitter
from toy_models import flux, kontext
from toy_models.data import random_views


def _draw(
    pipe: DiffusionPipeline, prompts: list[str], seed: int, size: int, images: list[Image.Image] | None = None, **more
) -> list[Image.Image]:
    """One square image for each prompt, each with a noise of its own."""
    pipe.set_progress_bar_config(disable=True)
    found = []
    for start in range(0, len(prompts), 32):
        batch = slice(start, start + 32)
        generators = [torch.Generator().manual_seed(seed * 100003 + i) for i in range(len(prompts))[batch]]
        references = {"image": images[batch]} if images else {}
        found += pipe(
            prompt=prompts[batch], height=size, width=size, num_inference_steps=10, generator=generators,
            max_sequence_length=pipe.tokenizer_2.model_max_length, **references, **more,
        ).images  # fmt: skip
    return found


def generator_quality(pipe: FluxPipeline, seed: int, count: int, sizes: tuple[int, ...] = (32, 64, 128)) -> dict:
    """Oracle means for ``count`` full and as many open prompts: {"64px": {"consistency": …, "open": {"agreement": …}}, …}."""
    rng = np.random.default_rng([seed, 40])
    full = [CHARACTERS[c] for c in rng.permutation(np.arange(count) % len(CHARACTERS))]
    views = random_views(count, rng)
    half_open = [opened(character, OPENINGS[number % len(OPENINGS)]) for number, character in enumerate(full)]
    quality = {}
    for size in sizes:
        found = []
        for named in (full, half_open):
            prompts = [grid_prompt(c, [VIEWS[i] for i in v]) for c, v in zip(named, views, strict=True)]
            reading = read_grids(_draw(pipe, prompts, seed, size, guidance_scale=flux.GUIDANCE))
            measures = {
                "consistency": reading.consistency(), "valid": reading.valid, "alignment": reading.alignment(named),
                "view": reading.view_following(views), "distinct": reading.distinctness(),
            }  # fmt: skip
            if named is half_open:
                choice = np.array([reading.choice(named, name) for name in ATTRIBUTES])
                measures |= {"agreement": reading.agreement(named), "choice": choice}
            found.append({name: float(values.mean()) for name, values in measures.items()})
        quality[f"{size}px"] = found[0] | {"open": found[1]}
    return quality


def editor_quality(pipe: FluxKontextPipeline, seed: int, count: int, sizes: tuple[int, ...] = (64, 128)) -> dict:
    """Oracle means for ``count`` edits over all characters: {"64px": {"edit": …, "followed": …, …}, …}.

    ``edit`` is sqrt(followed · kept), ``valid`` the share of valid panels.
    """
    everything, quality = range(len(CHARACTERS)), {}
    for size in sizes:
        rng = np.random.default_rng([seed, 41])
        edits = [random_edit(rng, everything, everything) for _ in range(count)]
        references = [draw_scene(e.characters, e.views, size, [random_jitter(rng) for _ in range(4)]) for e in edits]
        images = _draw(
            pipe, [edit.instruction for edit in edits], seed, size, references, guidance_scale=kontext.GUIDANCE,
            max_area=size * size, _auto_resize=False,
        )  # fmt: skip
        followed, kept = judge_edits(images, edits)
        measures = {"edit": np.sqrt(followed * kept), "followed": followed, "kept": kept, "valid": read_grids(images).valid}
        quality[f"{size}px"] = {name: float(values.mean()) for name, values in measures.items()}
    return quality
