"""The toy base models: what they can do, and that they cannot yet do what the quickstart teaches them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paco_toy.bases import judge, quality
from paco_toy.bases.panels import PanelCache
from paco_toy.world import CHARACTERS

MODELS = Path(__file__).resolve().parents[1] / "models"
SIZES = (64, 128)


def test_they_are_small_and_their_quality_is_on_record():
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24 << 20
    assert not [p for p in files if p.suffix in (".bin", ".pt", ".pkl")]  # safetensors only
    assert (MODELS / "build.log").stat().st_size > 0
    found = json.loads((MODELS / "quality.json").read_text())
    assert found["judge"]["caption_accuracy"] >= 0.95
    for size in SIZES:
        drawn = found["generator"][f"{size}px"]
        assert drawn["valid"] >= 0.9 and drawn["view"] >= 0.8 and 0.4 <= drawn["consistency"] <= 0.6


@pytest.mark.slow
def test_the_generator_draws_what_is_on_record():
    count, found = 48, json.loads((MODELS / "quality.json").read_text())["generator"]
    for size, drawn in quality.generator_quality(MODELS / "flux", seed=11, count=count, sizes=SIZES).items():
        # Other prompts, other noise: three standard errors of shares over `count` grids, at their widest.
        for name in ("valid", "view", "consistency"):
            assert drawn[name] == pytest.approx(found[size][name], abs=3 * 0.5 / np.sqrt(count)), (size, name)
        assert drawn["valid"] >= 0.85


@pytest.mark.slow
def test_the_judge_captions_and_is_at_chance_on_pairs():
    processor, model = judge.load_judge(MODELS / "judge")
    model.eval()
    batches = judge.CaptionBatches(processor, {side: PanelCache(side, 1, 5) for side in (32, 64)}, 5)
    assert judge.caption_accuracy(model, processor, batches, count=210) >= 0.95
    same, p_yes = pair_scores(model, processor, batches)
    assert 0.35 <= np.mean((p_yes > 0.5) == same) <= 0.65


def pair_scores(model, processor, batches, count=200):
    """(whether the two panels show one character, P(Yes)) for pairs that differ in one attribute if in any."""
    from paco_judge.questions import theme_question
    from paco_toy.world import departed, theme

    rng = np.random.default_rng(6)
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    same, p_yes = rng.random(count) < 0.5, []
    for start in range(0, count, 50):
        prompts, images = [], []
        for is_same in same[start : start + 50]:
            first = int(rng.integers(len(CHARACTERS)))
            second = first if is_same else departed(first, rng)
            question = theme_question(theme(CHARACTERS[first]))
            content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]
            prompts.append([{"role": "user", "content": content}])
            images += [batches.panel(first), batches.panel(second)]
        heads = [
            processor.tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts
        ]
        inputs = processor(text=heads, images=images, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[:, -1].double()
        p_yes += torch.sigmoid(logits[:, yes] - logits[:, no]).tolist()
    return same, np.array(p_yes)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_build_command_makes_both_folders_and_can_go_on(tmp_path):
    def build(*arguments):
        command = [sys.executable, "-m", "paco_toy.build_models", "--out", str(tmp_path / "models"), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    build("--scale", "0.003")
    models = tmp_path / "models"
    found = json.loads((models / "quality.json").read_text())
    assert set(found) == {"judge", "generator"} and (models / "flux" / "model_index.json").is_file()
    before = (models / "judge" / "model.safetensors").read_bytes()
    build("--continue-judge", "1", "--scale", "0.05")
    assert (models / "judge" / "model.safetensors").read_bytes() != before
    assert not list(tmp_path.glob(".building-*"))
    assert "_name_or_path" not in (models / "flux" / "model_index.json").read_text()
