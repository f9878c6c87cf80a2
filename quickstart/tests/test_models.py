"""The models of the quickstart load completely with the pinned libraries, and can be trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import FluxPipeline
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration

from paco_grpo.policies import PolicySettings, load_policy

MODELS = Path(__file__).resolve().parents[1] / "models"


@pytest.mark.parametrize("name", ["flux", "flux_kontext"])
def test_a_generator_loads(name):
    """Its text encoder has the names of published models.

    Every version of transformers reads those.
    """
    assert load_policy(MODELS / name, PolicySettings(max_sequence_length=8)).text_encoders()
    with safe_open(MODELS / name / "text_encoder" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert all(name.startswith("text_model.") for name in names)


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
