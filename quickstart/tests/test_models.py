"""The models of the quickstart load completely with the pinned libraries."""

from pathlib import Path

import pytest
from safetensors import safe_open

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
