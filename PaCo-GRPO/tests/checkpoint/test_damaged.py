"""Bytes of a run's folder that are not what we wrote: one sentence that names the file, never a traceback or a wrong run."""

import json
import shutil

import pytest
from tiny_run import load_script

from paco_grpo.policies import load_policy
from paco_grpo.training.build import load_adapter

STATE = "checkpoints/epoch_0002/state"
ADAPTER = "checkpoints/epoch_0002/adapter"


@pytest.fixture
def folder(trained_run, tmp_path):
    """A copy of a run's folder."""
    return shutil.copytree(trained_run.folder, tmp_path / "runs" / "run")


def write(data: bytes):
    return lambda path: path.write_bytes(data)


def change_json(**values):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", ["trainable.safetensors", "trainer.json"])
def test_a_damaged_checkpoint_is_one_sentence(trained_run, folder, tmp_path, capsys, name):
    (folder / STATE / name).write_bytes(b"[1]")
    arguments = ["--config", str(trained_run.folder / "saved.yaml"), f"--config.save_dir={tmp_path / 'runs'}"]
    assert load_script("train").main([*arguments, "--config.resume_from=latest", "--config.num_epochs=3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: cannot resume from")


@pytest.mark.parametrize(
    ("file", "damage"),
    [("adapter_model.safetensors", write(b"[1]")), ("adapter_config.json", change_json(target_modules=3))],
)
def test_a_damaged_adapter_is_one_sentence(trained_run, folder, tmp_path, capsys, file, damage):
    damage(folder / ADAPTER / file)
    arguments = ["--config", str(trained_run.folder / "saved.yaml"), "--adapter", str(folder / ADAPTER)]
    assert load_script("evaluate").main([*arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and str(folder / ADAPTER) in error


def test_an_adapter_imports_nothing(trained_run, folder):
    change_json(megatron_config={"a": 1}, megatron_core="no_such_module")(folder / ADAPTER / "adapter_config.json")
    load_adapter(load_policy(trained_run.options.pretrained.model), str(folder / ADAPTER))


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "eval/epoch_0000/eval_data.jsonl"])
def test_a_full_disk_ends_with_its_name(trained_run, tmp_path, capsys, file):
    path = tmp_path / "run" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")
    arguments = ["--config", str(trained_run.folder / "saved.yaml"), f"--config.save_dir={tmp_path}"]
    assert load_script("train").main([*arguments, "--config.test.at_start=True"]) in (2, 3)
    end_of_a_full_disk(capsys)


def test_an_evaluation_on_a_full_disk_ends_with_its_name(trained_run, tmp_path, capsys):
    (tmp_path / "results.md").symlink_to("/dev/full")
    arguments = ["--config", str(trained_run.folder / "saved.yaml"), "--output", str(tmp_path)]
    assert load_script("evaluate").main(arguments) == 2
    end_of_a_full_disk(capsys)


def end_of_a_full_disk(capsys):
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the disk is full") and "No space left on device" in error
