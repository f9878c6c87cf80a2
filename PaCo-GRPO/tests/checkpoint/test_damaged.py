"""Bytes of a run's folder that are not what we wrote: one sentence that names the file."""

import json
import shutil

import pytest
from tiny_run import load_script

from paco_grpo.policies import load_policy
from paco_grpo.policies.adapters import add_lora
from paco_grpo.training.build import find_adapter

ADAPTER = "checkpoints/epoch_0002/adapter"


@pytest.fixture
def folder(trained_run, tmp_path):
    return shutil.copytree(trained_run.folder, tmp_path / "runs" / "run")


def test_a_damaged_checkpoint_is_one_sentence(trained_run, folder, tmp_path, capsys):
    (folder / "checkpoints/epoch_0002/state/trainer.json").write_bytes(b"[1]")
    arguments = ["--config", str(trained_run.folder / "saved.yaml")]
    arguments.append(f"--config.save_dir={tmp_path / 'runs'}")
    arguments += ["--config.resume_from=latest", "--config.num_epochs=3"]
    assert load_script("train").main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: cannot resume from")


def test_an_adapter_imports_nothing(trained_run, folder):
    config = folder / ADAPTER / "adapter_config.json"
    values = json.loads(config.read_text())
    values |= {"megatron_config": {"a": 1}, "megatron_core": "no_such_module"}
    config.write_text(json.dumps(values))
    policy = load_policy(trained_run.options.pretrained.model)
    add_lora(policy, lora_path=find_adapter(folder / ADAPTER))


def test_a_full_disk_ends_with_its_name(trained_run, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    arguments = ["--config", str(trained_run.folder / "saved.yaml")]
    arguments += [f"--config.save_dir={tmp_path}", "--config.eval_freq=1"]
    assert load_script("train").main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the disk is full")
    assert "No space left on device" in error
