"""A repeated training resumes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from training_tools import adapter, losses, run_processes, train_config

from paco_judge.errors import UserError
from paco_judge.files import locked
from paco_reward.launch import run, with_resume


@pytest.mark.parametrize(
    ("files", "added"),
    [
        ("9/trainer_state.json 10/trainer_state.json", {"resume_from_checkpoint": "checkpoint-10"}),
        ("9/trainer_state.json 10/optimizer.pt", {"resume_from_checkpoint": "checkpoint-9"}),
        ("9/optimizer.pt", {"overwrite_output_dir": True}),  # cut off
        ("", {}),
    ],
)
def test_the_newest_whole_checkpoint_is_resumed(tmp_path, monkeypatch, files, added):
    monkeypatch.chdir(tmp_path)
    for name in files.split():
        file = Path("out", f"checkpoint-{name}")
        file.parent.mkdir(parents=True)
        file.touch()
    if "resume_from_checkpoint" in added:
        added = {"resume_from_checkpoint": f"out/{added['resume_from_checkpoint']}"}
    config = {"output_dir": "out", "do_train": True}
    assert with_resume(config) == config | added
    Path("out").mkdir(exist_ok=True)
    Path("out", "adapter_model.safetensors").touch()
    if files:
        assert with_resume(config) == config | added
    else:
        with pytest.raises(UserError, match="overwrite_output_dir"):
            with_resume(config)


def test_other_options_than_the_resumed_training_had_are_named(tmp_path, caplog):
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.parent.mkdir()
    state.touch()
    before = {"learning_rate": 1e-4, "seed": 7, "dataset": "a", "overwrite_output_dir": True}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(before))
    with_resume({"output_dir": str(tmp_path), "do_train": True, "learning_rate": 2e-4, "seed": 7})
    assert "another dataset, do_train, learning_rate, output_dir;" in caplog.text


def test_two_trainings_do_not_write_into_one_folder(judge_dir, data_dir, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(train_config(judge_dir, data_dir, output)))
    with locked(output), pytest.raises(UserError, match=str(output)):
        run(str(file), [], {})


CHANGES = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 4,
    "overwrite_output_dir": False,
    "disable_shuffling": False,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "lora_dropout": 0.1,
    "per_device_train_batch_size": 4,
    "first_token_weight": 0.1,
}


def train(judge_dir: Path, data_dir: Path, output: Path) -> None:
    """Eight steps that save every fourth one."""
    config = train_config(judge_dir, data_dir, output, **CHANGES)
    run_processes(["-m", "paco_reward.cli", "train"], [config], output.parent)


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_adapter(judge_dir, data_dir, tmp_path):
    """Weights, optimizer, schedule, data order and dropout are all restored."""
    whole = tmp_path / "whole"
    train(judge_dir, data_dir, whole)
    killed = tmp_path / "killed"
    shutil.copytree(whole / "checkpoint-4", killed / "checkpoint-4")
    train(judge_dir, data_dir, killed)
    state = Path("checkpoint-4", "trainer_state.json")
    # The first four steps were not repeated.
    assert (killed / state).stat().st_mtime == (whole / state).stat().st_mtime
    assert losses(killed) == pytest.approx(losses(whole), abs=1e-6)
    weights = adapter(killed)
    for name, expected in adapter(whole).items():
        np.testing.assert_allclose(weights[name], expected, atol=1e-6, err_msg=name)
