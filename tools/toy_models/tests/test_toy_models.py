"""The committed toy models: what they can do, and that they cannot yet do what the quickstart teaches them; and their builder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from paco_judge.questions import theme_question
from paco_toy.edits import random_edit
from paco_toy.world import CHARACTERS, departed, theme
from toy_models import judge, quality
from toy_models.data import DEPARTURE, KINDS, edit_target
from toy_models.kontext import INSTRUCTIONS, TEXT_TOKENS

TOOLS = Path(__file__).resolve().parents[2]
MODELS = TOOLS.parent / "quickstart" / "models"
RECORDED = json.loads((MODELS / "quality.json").read_text())


def test_committed_weights_have_the_quality_that_the_quickstart_needs():
    assert RECORDED["judge"]["caption_accuracy"] >= 0.95
    for size in (64, 128):
        drawn = RECORDED["generator"][f"{size}px"]
        assert drawn["valid"] >= 0.9 and drawn["view"] >= 0.8 and 0.4 <= drawn["consistency"] <= 0.6
        # An open prompt's panels have what is named and disagree on the rest, and every value is drawn.
        assert (
            drawn["open"]["alignment"] >= 0.75 and drawn["open"]["agreement"] <= 0.5 and drawn["open"]["choice"] >= 0.85
        )
        edited = RECORDED["editors"]["flux_kontext"][f"{size}px"]
        assert 0.25 <= edited["edit"] <= 0.85 and edited["valid"] >= 0.85 and edited["kept"] >= 0.75


@pytest.mark.slow
def test_generator_and_editor_have_the_recorded_quality():
    # Other prompts, other noise: three standard errors of shares over `count` grids, at their widest.
    count = 32
    pipe = FluxPipeline.from_pretrained(MODELS / "flux", torch_dtype=torch.float32)
    drawn = quality.generator_quality(pipe, 11, count, sizes=(64,))["64px"]
    for name in ("valid", "view", "consistency"):
        assert drawn[name] == pytest.approx(RECORDED["generator"]["64px"][name], abs=3 * 0.5 / np.sqrt(count)), name
    pipe = FluxKontextPipeline.from_pretrained(MODELS / "flux_kontext", torch_dtype=torch.float32)
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        rows = tokenizer(INSTRUCTIONS).input_ids
        assert len({tuple(row) for row in rows}) == len(INSTRUCTIONS)
        assert all(tokenizer.unk_token_id not in row and len(row) <= TEXT_TOKENS for row in rows)
    edited = quality.editor_quality(pipe, 11, count, sizes=(64,))["64px"]
    assert edited == pytest.approx(RECORDED["editors"]["flux_kontext"]["64px"], abs=3 * 0.5 / np.sqrt(count))


@pytest.mark.slow
def test_the_judge_captions_and_is_at_chance_on_pairs():
    """Pairs differ in one attribute if in any."""
    processor = Qwen2_5_VLProcessor.from_pretrained(MODELS / "judge")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(MODELS / "judge", dtype=torch.float32).eval()
    batches = judge.CaptionBatches(processor, 5)
    assert judge.caption_accuracy(model, batches, count=105) >= 0.95
    rng = np.random.default_rng(6)
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    same, texts, images = rng.random(100) < 0.5, [], []
    for is_same in same:
        first = int(rng.integers(len(CHARACTERS)))
        images += [batches.panel(c) for c in (first, first if is_same else departed(first, rng))]
        texts.append(judge.chat_prompt(processor, theme_question(theme(CHARACTERS[first])), 2))
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1]
    assert 0.35 <= np.mean((logits[:, yes] > logits[:, no]).numpy() == same) <= 0.65


def test_training_edits_follow_their_instructions_or_depart_from_them():
    rng, everything = np.random.default_rng(0), range(len(CHARACTERS))
    edits = [random_edit(rng, everything, everything) for _ in range(2000)]
    assert all(edit_target(edit, 0.0, rng) == edit.edited() for edit in edits[:100])
    targets = [edit_target(edit, DEPARTURE, rng) for edit in edits]
    changed = np.array([sum(a != b for a, b in zip(e.characters, t)) for e, t in zip(edits, targets)])
    followed = np.array([t[e.place] == e.result for e, t in zip(edits, targets)])
    for found, share in (
        (changed == 0, DEPARTURE * KINDS["untouched"]),
        (changed == 2, DEPARTURE * KINDS["one more"]),
        (followed, 1 - DEPARTURE * (1 - KINDS["one more"])),
    ):
        assert found.mean() == pytest.approx(share, abs=0.03)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_commands_of_the_page_build_every_model(tmp_path):
    page = (TOOLS / "toy_models" / "README.md").read_text()
    commands = [line for line in page.splitlines() if "-m toy_models.build" in line]
    assert len(commands) == 4
    for line in commands:
        command = line.replace("../quickstart/models", f"{tmp_path} --minutes 0.05 --count 4")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-c", command], cwd=TOOLS, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert set(json.loads((tmp_path / "quality.json").read_text())) == {"judge", "generator", "editors"}
    assert "_name_or_path" not in (tmp_path / "flux" / "model_index.json").read_text()
    shutil.rmtree(tmp_path)
