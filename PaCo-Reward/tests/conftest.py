"""Fixtures: a tiny judge and a tiny pair data set, made once per session."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

HERE = Path(__file__).parent
torch.set_num_threads(1)
# Machines that run tests are shared: time limits belong to pytest, not to single examples.
settings.register_profile("paco_reward", deadline=None)
settings.load_profile("paco_reward")


def load(name: str, file: Path):
    """A module by file: test folders of different subprojects may hold files of one name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load("paco_reward_fake_judge", HERE.parent / "judge" / "tests" / "fake_judge.py")
tiny_judge = load("paco_reward_tiny_judge", HERE / "tiny_judge.py")
pairing_tools = load("pairing_tools", HERE / "pairing_tools.py")
training_tools = load("training_tools", HERE / "training_tools.py")
load("tiny_pipelines", HERE.parents[1] / "PaCo-GRPO" / "tests" / "tiny_pipelines.py")
bench_tools = load("bench_tools", HERE / "bench_tools.py")
world = pairing_tools.world
bench, rank, examples, edits = bench_tools.bench, bench_tools.rank, bench_tools.examples, bench_tools.edits
answering_judge = bench_tools.answering_judge


@pytest.fixture(scope="session")
def tiny():
    """The builder module."""
    return tiny_judge


@pytest.fixture(scope="session")
def judge_dir(tmp_path_factory) -> Path:
    """A random judge as a model folder."""
    return tiny_judge.save_judge(tmp_path_factory.mktemp("model") / "judge")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Data sets `pairs` (16 rows) and `held_out` (10 rows)."""
    folder = tiny_judge.save_pairs(tmp_path_factory.mktemp("data"), 16, "pairs")
    return tiny_judge.save_pairs(folder, 10, "held_out", seed=500)


@pytest.fixture(scope="session")
def scorer(judge_dir):
    """The random judge, loaded."""
    from paco_judge.scorer import JudgeScorer

    return JudgeScorer.from_pretrained(judge_dir, batch_size=4)
