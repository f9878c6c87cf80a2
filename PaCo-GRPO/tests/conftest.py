"""Shared by all PaCo-GRPO tests: one thread, and one tiny random FLUX pipeline folder."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # so that `from tiny_flux import …` works under importlib mode

torch.set_num_threads(1)
settings.register_profile("paco_grpo", deadline=None)  # a busy machine is not a failure
settings.load_profile("paco_grpo")


@pytest.fixture(scope="session")
def tiny_flux_dir(tmp_path_factory) -> Path:
    """Folder of a tiny random FLUX pipeline (see tiny_flux.py); read only."""
    from tiny_flux import build_tiny_flux

    return build_tiny_flux(tmp_path_factory.mktemp("tiny_flux"))
