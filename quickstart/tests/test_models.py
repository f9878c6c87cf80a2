"""The models of the quickstart load completely with the pinned libraries, and can be trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import FluxPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

MODELS = Path(__file__).resolve().parents[1] / "models"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_command_of_the_page_trains_every_model(tmp_path):
    (command,) = [
        line
        for line in (MODELS / "README.md").read_text().splitlines()
        if "build.py $model" in line
    ]
    command = command.replace("--out my_models", f"--out {tmp_path} --minutes 0.05")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ec", command],
        cwd=MODELS.parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
        check=True,
    )
    new = FluxPipeline.from_pretrained(tmp_path / "flux").transformer.state_dict()
    old = FluxPipeline.from_pretrained(MODELS / "flux").transformer.state_dict()
    assert new.keys() == old.keys()
    assert not any(new[name].equal(weight) for name, weight in old.items() if weight.ndim > 1)
    Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "judge")
    assert "_name_or_path" not in (tmp_path / "flux" / "model_index.json").read_text()
