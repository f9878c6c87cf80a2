"""Fixtures: a tiny judge and a tiny pair data set, made once per session."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
torch.set_num_threads(1)
# Machines that run tests are shared: time limits belong to pytest, not to single examples.
settings.register_profile("paco_reward", deadline=None)
settings.load_profile("paco_reward")
sys.path[:0] = [
    str(HERE),
    str(HERE.parents[1] / "PaCo-GRPO" / "tests"),
]  # a judge on loopback and tiny pipelines are shared

import tiny_judge
from bench_tools import answering_judge, bench, choices, edits, examples, rank_command  # noqa: F401
from pairing_tools import world  # noqa: F401

from paco_judge.scorer import JudgeScorer


@pytest.fixture(scope="session")
def tiny():
    """The builder module."""
    return tiny_judge


@pytest.fixture(scope="session")
def judge_dir(tmp_path_factory) -> Path:
    """A random judge as a model folder."""
    return tiny_judge.save_judge(tmp_path_factory.mktemp("model") / "judge")


@pytest.fixture(scope="session")
def adapter_dir(judge_dir, tmp_path_factory) -> Path:
    """A LoRA adapter that changes the judge's scores visibly."""
    model = AutoModelForImageTextToText.from_pretrained(judge_dir)
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj", "qkv"])
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Data sets `pairs` (16 rows) and `held_out` (10 rows)."""
    folder = tiny_judge.save_pairs(tmp_path_factory.mktemp("data"), 16, "pairs")
    return tiny_judge.save_pairs(folder, 10, "held_out", seed=500)


@pytest.fixture(scope="session")
def scorer(judge_dir):
    """The random judge, loaded."""
    return JudgeScorer.from_pretrained(judge_dir, batch_size=4)
