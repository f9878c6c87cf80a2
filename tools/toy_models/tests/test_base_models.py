"""The toy base models: what they can do, and that they cannot yet do what the quickstart teaches them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paco_judge.questions import theme_question
from paco_toy.world import CHARACTERS, departed, theme
from toy_models import judge, quality
from toy_models.panels import PanelCache

TOOLS = Path(__file__).resolve().parents[2]
MODELS = TOOLS.parent / "quickstart" / "models"
RECORDED = json.loads((MODELS / "quality.json").read_text())


def test_committed_weights_are_safetensors_of_recorded_quality():
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert not [p for p in files if p.suffix in (".bin", ".pt", ".pkl")]
    assert RECORDED["judge"]["caption_accuracy"] >= 0.95
    for size in (64, 128):
        drawn = RECORDED["generator"][f"{size}px"]
        assert drawn["valid"] >= 0.9 and drawn["view"] >= 0.8 and 0.4 <= drawn["consistency"] <= 0.6
        # An open prompt's panels have what is named and disagree on the rest, and every value is drawn.
        assert drawn["open"]["alignment"] >= 0.75 and drawn["open"]["agreement"] <= 0.5 and drawn["open"]["choice"] >= 0.85
    for sizes in RECORDED["editors"].values():
        for drawn in sizes.values():
            assert 0.25 <= drawn["edit"] <= 0.85  # RL has room, and something to start from
            assert drawn["valid"] >= 0.85 and drawn["kept"] >= 0.75


@pytest.mark.slow
def test_the_generator_has_the_recorded_quality():
    count = 48
    drawn = quality.generator_quality(MODELS / "flux", seed=11, count=count, sizes=(64,))["64px"]
    # Other prompts, other noise: three standard errors of shares over `count` grids, at their widest.
    for name in ("valid", "view", "consistency"):
        assert drawn[name] == pytest.approx(RECORDED["generator"]["64px"][name], abs=3 * 0.5 / np.sqrt(count)), name
    assert drawn["valid"] >= 0.85


@pytest.mark.slow
def test_the_judge_captions_and_is_at_chance_on_pairs():
    """Pairs differ in one attribute if in any."""
    processor, model = judge.load_judge(MODELS / "judge")
    model.eval()
    batches = judge.CaptionBatches(processor, {side: PanelCache(side, 1, 5) for side in (32, 64)}, 5)
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


def build(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "toy_models.build", *map(str, arguments), "--count", "4"]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_build_command_makes_both_folders_and_can_continue(tmp_path):
    models = tmp_path / "models"
    build("--out", models, "--scale", "0.003")
    assert set(json.loads((models / "quality.json").read_text())) == {"judge", "generator"}
    weights = [models / "judge" / "model.safetensors", models / "flux/transformer/diffusion_pytorch_model.safetensors"]
    before = [path.read_bytes() for path in weights]
    build("judge", "--out", models, "--continue", "0.05")
    build("flux", "--out", models, "--continue", "0.05")
    assert all(path.read_bytes() != old for path, old in zip(weights, before, strict=True))
    assert {weight.dtype for weight in load_file(weights[0]).values()} == {torch.bfloat16}
    assert not list(tmp_path.glob(".building-*"))
    assert "_name_or_path" not in (models / "flux" / "model_index.json").read_text()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_build_command_makes_an_editor_and_can_continue(tmp_path):
    models = tmp_path / "models"
    shutil.copytree(MODELS / "flux", models / "flux")

    build("flux_kontext", "--out", models, "--minutes", "0.05")
    weights = models / "flux_kontext/transformer/diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    build("flux_kontext", "--out", models, "--continue", "0.05")
    assert weights.read_bytes() != before
    assert set(json.loads((models / "quality.json").read_text())["editors"]["flux_kontext"]) == {"64px", "128px"}
