"""Shared by all PaCo-GRPO tests: one thread, and tiny random pipeline folders."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# So that `from tiny_pipelines import …` works under importlib mode.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
settings.register_profile("paco_grpo", deadline=None)  # a busy machine is not a failure
settings.load_profile("paco_grpo")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Policy name (see tiny_policies.py) → folder of its tiny random pipeline, built on first use;
    read only.
    """
    from tiny_policies import build

    return functools.cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tiny_flux_dir(tiny_folder) -> Path:
    """Folder of the tiny random FLUX pipeline; read only."""
    return tiny_folder("flux")


@pytest.fixture(scope="session")
def trained_run(tiny_flux_dir, tmp_path_factory):
    """A finished run of two epochs, with its options in saved.yaml; read only."""
    from tiny_run import tiny_options, train

    from paco_grpo.options import options_to_yaml

    run = train(
        tiny_options(tiny_flux_dir, tmp_path_factory.mktemp("trained"), train__learning_rate=0.05)
    ).run
    (run.folder / "saved.yaml").write_text(options_to_yaml(run.options))
    return run
