"""The trained toy Qwen-Image-Edit in quickstart/models: small, readable by the oracle, and as good as its figures say."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paco_grpo.policies import load_policy
from paco_grpo.sampling.rollout import rollout
from paco_grpo.types import Item
from paco_toy.bases import qwen_edit
from paco_toy.bases.edit_quality import editor_quality
from paco_toy.bases.panels import PanelCache, random_views
from paco_toy.bases.qwen_text import NO_INSTRUCTION
from paco_toy.bases.qwen_vae import qwen_round_trip
from paco_toy.edits import draw_scene, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS

MODELS = Path(__file__).resolve().parents[1] / "models"
FOLDER = MODELS / qwen_edit.NAME


@pytest.fixture(scope="module")
def pipe():
    return qwen_edit.load(FOLDER)


def test_it_is_small_and_its_quality_is_on_record():
    weights = [path for path in FOLDER.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pkl")]
    assert {path.suffix for path in weights} == {".safetensors"} and sum(p.stat().st_size for p in weights) < 7 << 20
    found = json.loads((MODELS / "quality.json").read_text())["editors"][qwen_edit.NAME]["64px"]
    assert found["valid"] > 0.9 and found["kept"] > 0.8 and 0.25 <= found["edit"] <= 0.65
    assert (MODELS / f"build_{qwen_edit.NAME}.log").stat().st_size > 0


def test_the_oracle_reads_what_has_been_through_the_vae(pipe):
    rng = np.random.default_rng(9)
    characters, views = rng.integers(len(CHARACTERS), size=(24, 4)), random_views(24, rng)
    pixels = qwen_round_trip(pipe.vae, PanelCache(32, 1, 3).draw_grids(characters, views, rng))
    reading = read_grids([Image.fromarray(image) for image in pixels])
    assert reading.valid.mean() >= 0.98 and (reading.character == characters).mean() >= 0.98
    assert (reading.view == views).mean() >= 0.98


def test_the_policy_draws_what_diffusers_pipeline_draws(pipe):
    rng = np.random.default_rng(2)
    edits = [random_edit(rng, range(len(CHARACTERS)), range(len(CHARACTERS))) for _ in range(2)]
    references = [draw_scene(e.characters, e.views, 64, [(0.0, 0.0)] * 4) for e in edits]
    policy = load_policy(FOLDER, guidance_scale=2.0, negative_prompt=NO_INSTRUCTION, dtype=torch.float32)
    items = [Item(i, e.instruction, 64, 64, image=r) for i, (e, r) in enumerate(zip(edits, references, strict=True))]
    record = rollout(policy, policy.encode(items), [0, 1], [5, 6], 64, 64, num_steps=4, noise_steps=(), noise_level=0.7)
    ours = policy.decode(record.clean_latents, 64, 64)
    pipe.set_progress_bar_config(disable=True)
    theirs = qwen_edit.draw(pipe, references, [e.instruction for e in edits], [5, 6], steps=4, guidance=2.0)
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max() <= 2


@pytest.mark.slow
def test_it_edits_as_well_as_is_on_record(pipe):
    count, found = 48, json.loads((MODELS / "quality.json").read_text())["editors"][qwen_edit.NAME]
    drawn = editor_quality(qwen_edit, pipe, seed=11, count=count, sizes=(64,))["64px"]
    for name in (
        "edit",
        "followed",
        "kept",
        "valid",
    ):  # other scenes, other noise: three standard errors at their widest
        assert drawn[name] == pytest.approx(found["64px"][name], abs=3 * 0.5 / np.sqrt(count)), name
