"""The recipes of the quickstart's models train every weight, and save models that load."""

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
    page = (MODELS / "README.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("python ")]
    _, *arguments = command.replace("my_models", f"{tmp_path} --share 1e-4").split()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=MODELS.parents[1], env=environment, check=True)
    new = FluxPipeline.from_pretrained(tmp_path / "flux").transformer.state_dict()
    old = FluxPipeline.from_pretrained(MODELS / "flux").transformer.state_dict()
    assert new.keys() == old.keys()
    assert not any(new[name].equal(weight) for name, weight in old.items() if weight.ndim > 1)
    Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "judge")
