"""The committed toy models: what they can do, and that they cannot yet do what the quickstart teaches them; and their builder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

from paco_toy.edits import judge_edits, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS, OPENINGS, VIEWS, grid_prompt, opened, render_grid, to_image
from toy_models import flux, kontext
from toy_models.data import random_views

TOOLS = Path(__file__).resolve().parents[2]
MODELS = TOOLS.parent / "quickstart" / "models"


def drawn(pipe, prompts, **more):
    """An image of 64 px for each prompt, each with a noise of its own."""
    pipe.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    return pipe(prompt=prompts, height=64, width=64, num_inference_steps=10, generator=noise,
                max_sequence_length=pipe.tokenizer_2.model_max_length, **more).images  # fmt: skip


@pytest.mark.slow
def test_the_generator_draws_well_and_does_not_keep_identity():
    pipe, rng = FluxPipeline.from_pretrained(MODELS / "flux", torch_dtype=torch.float32), np.random.default_rng(0)
    full = [CHARACTERS[c] for c in rng.permutation(len(CHARACTERS))[:48]]
    views, readings = random_views(len(full), rng), []
    half_open = [opened(character, OPENINGS[number % len(OPENINGS)]) for number, character in enumerate(full)]
    for named in (full, half_open):
        prompts = [grid_prompt(c, [VIEWS[i] for i in v]) for c, v in zip(named, views)]
        readings.append(read_grids(drawn(pipe, prompts, guidance_scale=flux.GUIDANCE)))
        assert readings[-1].valid.mean() >= 0.9 and readings[-1].view_following(views).mean() >= 0.8
    assert 0.3 <= readings[0].consistency().mean() <= 0.6
    # An open prompt's panels have what is named and disagree on the rest, and every value is drawn.
    assert readings[1].alignment(half_open).mean() >= 0.75 and np.nanmean(readings[1].agreement(half_open)) <= 0.5
    assert all(readings[1].choice(half_open, name) >= 0.8 for name in ("style", "colour"))


@pytest.mark.slow
def test_the_editor_keeps_what_it_sees_and_does_not_follow_reliably():
    pipe, rng = FluxKontextPipeline.from_pretrained(MODELS / "flux_kontext", torch_dtype=torch.float32), np.random.default_rng(0)
    rows = pipe.tokenizer_2(kontext.INSTRUCTIONS).input_ids
    assert len({tuple(row) for row in rows}) == len(kontext.INSTRUCTIONS)
    assert all(pipe.tokenizer_2.unk_token_id not in row and len(row) <= kontext.TEXT_TOKENS for row in rows)
    everything = range(len(CHARACTERS))
    edits = [random_edit(rng, everything, everything) for _ in range(32)]
    references = [to_image(render_grid(e.characters, e.views, 32, rng)) for e in edits]
    images = drawn(pipe, [edit.instruction for edit in edits], image=references, guidance_scale=kontext.GUIDANCE, max_area=64 * 64,
                   _auto_resize=False)  # fmt: skip
    followed, kept = judge_edits(images, edits)
    assert 0.2 <= np.sqrt(followed * kept).mean() <= 0.85 and kept.mean() >= 0.75 and read_grids(images).valid.mean() >= 0.85


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_commands_of_the_page_build_every_model(tmp_path):
    page = (TOOLS / "toy_models" / "README.md").read_text()
    commands = [line for line in page.splitlines() if "-m toy_models.build" in line]
    assert len(commands) == 4
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in commands:
        command = line.replace("../quickstart/models", f"{tmp_path} --minutes 0.05")
        done = subprocess.run(["bash", "-c", command], cwd=TOOLS, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    FluxKontextPipeline.from_pretrained(tmp_path / "flux_kontext")
    Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "judge")
    assert "_name_or_path" not in (tmp_path / "flux" / "model_index.json").read_text()
    shutil.rmtree(tmp_path)
