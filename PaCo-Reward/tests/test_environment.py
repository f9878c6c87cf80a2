"""Packages that have to fit each other, and the two that are pinned for it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers.integrations.flash_attention import flash_attention_forward

from paco_reward.environment import check_torchaudio
from paco_reward.errors import PacoRewardError

PACKAGE = Path(__file__).resolve().parents[1]
REFUSAL = "Detected that PyTorch and TorchAudio were compiled with different CUDA versions."


@pytest.fixture
def other_cuda(tmp_path, monkeypatch) -> Path:
    """A folder with a torchaudio that was built for another CUDA version than torch."""
    (tmp_path / "torchaudio.py").write_text(f"raise RuntimeError({REFUSAL!r})\n")
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_torchaudio_for_another_cuda_version_is_one_message(other_cuda):
    with pytest.raises(PacoRewardError, match="different CUDA versions.*'torch<2.15'"):
        check_torchaudio()


@pytest.mark.slow
def test_training_says_so_before_anything_else(other_cuda):
    command = [sys.executable, "-m", "paco_reward.cli", "train", "config/toy_reward_lora.yaml"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(other_cuda)}
    options = {"cwd": PACKAGE, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=120, **options)
    assert done.returncode == 1
    assert "torchaudio" in done.stderr
    assert "Traceback" not in done.stderr


def test_both_subprojects_allow_the_same_torch():
    """One environment may hold both; without our pins, the newest allowed release is installed."""
    reward = tomllib.loads((PACKAGE / "LLaMA-Factory/pyproject.toml").read_text())["project"]
    grpo = tomllib.loads((PACKAGE.parent / "PaCo-GRPO/pyproject.toml").read_text())["project"]
    setup = (PACKAGE / "LLaMA-Factory/setup.py").read_text()
    allowed = {}
    for line in grpo["dependencies"]:
        requirement = Requirement(line.replace("{root:parent:uri}", "file:///clone"))
        allowed[requirement.name] = requirement
    for line in reward["optional-dependencies"]["torch"]:
        requirement = Requirement(line)
        assert requirement == allowed[requirement.name]
        assert f'"{line}"' in setup
    assert not allowed["torch"].specifier.contains("2.15.0")
    assert not allowed["transformers"].specifier.contains("5.6.0")


def test_flash_attention_works_without_attention_sinks(monkeypatch):
    """transformers 5.6.0 converts ``s_aux`` to another type even where it is None: in every Qwen."""
    seen = {}

    def attention(query, key, value, *arguments, **options):
        seen.update(options)
        return query

    module = torch.nn.Module()
    module.is_causal = True
    module.config = type("Config", (), {"_attn_implementation": "flash_attention_2"})()
    name = "transformers.integrations.flash_attention._flash_attention_forward"
    monkeypatch.setattr(name, attention)
    states = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    output, _ = flash_attention_forward(module, states, states, states, None, s_aux=None)
    assert output.shape == (1, 3, 2, 4)
    assert seen["s_aux"] is None
