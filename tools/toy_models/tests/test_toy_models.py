"""The builders of the toy models. The quickstart's own tests measure what the weights can do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import FluxKontextPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

TOOLS = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_commands_of_the_page_build_every_model(tmp_path):
    page = (TOOLS / "toy_models" / "README.md").read_text()
    commands = [line for line in page.splitlines() if "-m toy_models.build" in line]
    assert len(commands) == 4
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for line in commands:
        command = line.replace("../quickstart/models", f"{tmp_path} --minutes 0.05")
        done = subprocess.run(
            ["bash", "-c", command], cwd=TOOLS, env=env, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    FluxKontextPipeline.from_pretrained(tmp_path / "flux_kontext")
    Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "judge")
    assert "_name_or_path" not in (tmp_path / "flux" / "model_index.json").read_text()
    shutil.rmtree(tmp_path)
