"""The toy editors: they load, read every instruction, and have the recorded quality; and their training data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxKontextPipeline
from PIL import Image

from paco_grpo.policies import load_policy
from paco_grpo.types import Item
from paco_toy.edit_oracle import judge_edits
from paco_toy.edits import Edit
from paco_toy.world import CHARACTERS, COLOURS, VIEWS
from toy_models.build import EDITORS, load_editor
from toy_models.edit_data import DEPARTURE, INSTRUCTIONS, KINDS, VALUES, render_edits, sample_edits
from toy_models.kontext import TEXT_TOKENS
from toy_models.panels import PanelCache
from toy_models.quality import editor_quality, record_quality

MODELS = Path(__file__).resolve().parents[3] / "quickstart" / "models"


def test_kontext_reads_every_instruction_and_loads_everywhere():
    folder = MODELS / "flux_kontext"
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert type(pipe) is FluxKontextPipeline
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        rows = tokenizer(INSTRUCTIONS).input_ids
        assert len({tuple(row) for row in rows}) == len(INSTRUCTIONS)
        assert all(tokenizer.unk_token_id not in row and len(row) <= TEXT_TOKENS for row in rows)
        assert tokenizer("make the star pink").input_ids.count(tokenizer.unk_token_id) == 1
    policy = load_policy(folder, max_sequence_length=TEXT_TOKENS, guidance_scale=2.5)
    item = Item(0, "make the star blue", 64, 64, image=Image.new("RGB", (128, 128), "white"))
    velocity = policy.velocity(torch.zeros(1, 64, 16), torch.tensor([0.5]), policy.encode([item]), 64, 64)
    assert velocity.shape == (1, 64, 16) and velocity.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITORS)
def test_an_editor_has_the_recorded_quality(name):
    count, recorded = 32, json.loads((MODELS / "quality.json").read_text())["editors"][name]["64px"]
    drawn = editor_quality(EDITORS[name], load_editor(MODELS / name), 11, count, sizes=(64,))["64px"]
    # Other edits, other noise: three standard errors of shares over `count` edits, at their widest.
    assert drawn == pytest.approx(recorded, abs=3 * 0.5 / np.sqrt(count))


def test_training_edits_follow_their_instructions_or_depart_from_them():
    rng = np.random.default_rng(0)
    batch = sample_edits(2000, rng, departure=0.0)
    assert (batch.before != batch.after).sum(axis=1).tolist() == [1] * 2000
    for b in range(0, 2000, 97):
        before, after = (CHARACTERS[kind[b, batch.place[b]]] for kind in (batch.before, batch.after))
        value = VALUES[batch.value[b]]
        assert batch.instructions[b] == f"make the {before.shape} {value}" and after.shape == before.shape
        assert (after.colour, after.style) == ((value, before.style) if value in COLOURS else (before.colour, value))
        assert len({CHARACTERS[c].shape for c in batch.before[b]}) == 4
    batch = sample_edits(4000, rng)
    followed = [
        VALUES[v] in str(CHARACTERS[c]).split() for v, c in zip(batch.value, batch.after[np.arange(4000), batch.place])
    ]
    unfaithful = DEPARTURE * (1 - KINDS["one more"])
    assert np.mean(followed) == pytest.approx(1 - unfaithful, abs=0.03)
    changed = (batch.before != batch.after).sum(axis=1)
    for count, share in ((0, DEPARTURE * KINDS["untouched"]), (2, DEPARTURE * KINDS["one more"])):
        assert (changed == count).mean() == pytest.approx(share, abs=0.03)


def test_pixels_of_training_edits_satisfy_the_oracle():
    batch = sample_edits(12, np.random.default_rng(3), departure=0.0)
    references, targets = render_edits(batch, PanelCache(32, 2, 0))
    edits = [
        Edit(tuple(CHARACTERS[c] for c in scene), tuple(VIEWS[v] for v in views), int(place),
             "colour" if VALUES[value] in COLOURS else "style", VALUES[value])
        for scene, views, place, value in zip(batch.before, batch.views, batch.place, batch.value)
    ]  # fmt: skip
    for pixels, wanted in ((targets, 1.0), (references, 0.0)):
        followed, kept = judge_edits([Image.fromarray(image) for image in pixels], edits)
        assert followed.tolist() == [wanted] * 12 and kept.tolist() == [1.0] * 12
    same = (references == targets).reshape(12, 2, 32, 2, 32, 3).all(axis=(2, 4, 5)).reshape(12, 4)
    assert (same.sum(axis=1) == 3).all() and not same[np.arange(12), batch.place].any()


def test_recorded_quality_keeps_what_is_known(tmp_path):
    path = tmp_path / "quality.json"
    path.write_text(json.dumps({"judge": {"a": 1}, "editors": {"x": {"b": 2}}}))
    record_quality(path, {"editors": {"y": {"c": 3}}})
    record_quality(path, {"judge": {"d": 4}})
    assert json.loads(path.read_text()) == {"judge": {"d": 4}, "editors": {"x": {"b": 2}, "y": {"c": 3}}}
