"""The committed toy editor, and the builder. quickstart/tests/test_whole.py measures the other models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

from paco_toy.edits import judge_edits, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS, render_grid, to_image
from toy_models import kontext

TOOLS = Path(__file__).resolve().parents[2]
MODELS = TOOLS.parent / "quickstart" / "models"


@pytest.mark.slow
def test_the_editor_keeps_what_it_sees_and_does_not_follow_reliably():
    pipe, rng = FluxKontextPipeline.from_pretrained(MODELS / "flux_kontext", torch_dtype=torch.float32), np.random.default_rng(0)
    rows = pipe.tokenizer_2(kontext.INSTRUCTIONS).input_ids
    assert len({tuple(row) for row in rows}) == len(kontext.INSTRUCTIONS)
    assert all(pipe.tokenizer_2.unk_token_id not in row and len(row) <= kontext.TEXT_TOKENS for row in rows)
    everything = range(len(CHARACTERS))
    edits = [random_edit(rng, everything, everything) for _ in range(32)]
    references = [to_image(render_grid(e.characters, e.views, 32, rng)) for e in edits]
    pipe.set_progress_bar_config(disable=True)
    noise = [torch.Generator().manual_seed(i) for i in range(len(edits))]
    images = pipe(prompt=[edit.instruction for edit in edits], image=references, guidance_scale=kontext.GUIDANCE,
                  height=64, width=64, num_inference_steps=10, generator=noise, max_sequence_length=kontext.TEXT_TOKENS,
                  max_area=64 * 64, _auto_resize=False).images  # fmt: skip
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
