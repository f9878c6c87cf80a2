"""Bytes of a run's folder that are not what we wrote: one sentence that names the file, never a traceback or a wrong run."""

import errno
import json
import shutil

import pytest
from PIL import Image
from tiny_run import load_script, tiny_options, train

from paco_grpo.options import options_to_yaml
from paco_grpo.policies import load_policy
from paco_grpo.training.build import load_adapter

STATE = "checkpoints/epoch_0001/state"
ADAPTER = "checkpoints/epoch_0001/adapter"


@pytest.fixture(scope="module")
def finished(tiny_flux_dir, tmp_path_factory):
    """A run of one epoch."""
    trainer = train(tiny_options(tiny_flux_dir, tmp_path_factory.mktemp("finished"), num_epochs=1, eval_freq=1))
    (trainer.run.folder / "saved.yaml").write_text(options_to_yaml(trainer.options))
    return trainer.run


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(finished.folder, tmp_path / "runs" / "run")


def write(data: bytes):
    return lambda path: path.write_bytes(data)


def change_json(**values):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", ["trainable.safetensors", "trainer.json"])
def test_a_damaged_checkpoint_is_one_sentence(finished, folder, tmp_path, capsys, name):
    (folder / STATE / name).write_bytes(b"[1]")
    arguments = ["--config", str(finished.folder / "saved.yaml"), f"--config.save_dir={tmp_path / 'runs'}"]
    assert load_script("train").main([*arguments, "--config.resume_from=latest", "--config.num_epochs=2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: cannot resume from")


@pytest.mark.parametrize(
    ("file", "damage"),
    [("adapter_model.safetensors", write(b"[1]")), ("adapter_config.json", change_json(target_modules=3))],
)
def test_a_damaged_adapter_is_one_sentence(finished, folder, tmp_path, capsys, file, damage):
    damage(folder / ADAPTER / file)
    arguments = ["--config", str(finished.folder / "saved.yaml"), "--adapter", str(folder / ADAPTER)]
    assert load_script("evaluate").main([*arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and str(folder / ADAPTER) in error


def test_an_adapter_imports_nothing(finished, folder):
    change_json(megatron_config={"a": 1}, megatron_core="no_such_module")(folder / ADAPTER / "adapter_config.json")
    load_adapter(load_policy(finished.options.pretrained.model), str(folder / ADAPTER))


@pytest.mark.parametrize("data", [bytes(range(256)), b"- 1\n- 2"])
def test_a_damaged_configuration_is_one_sentence(tmp_path, capsys, data):
    (tmp_path / "config.yaml").write_bytes(data)
    status = load_script("train").main(["--config", str(tmp_path / "config.yaml")])
    error = capsys.readouterr().err.splitlines()
    assert status == 2 and len(error) == 1 and error[0].startswith("error: ")


# --- a full disk ----------------------------------------------------------------------------------------------------------


def fill_disk(path, monkeypatch):
    """Every write to ``path`` fails as on a full disk."""
    if path.suffix == ".png":  # Pillow follows links, and looks at the suffix of what it finds

        def save(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Image.Image, "save", save)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "eval/epoch_0000/eval_data.jsonl", "1.png"])  # fmt: skip
def test_a_full_disk_ends_training_with_its_name(finished, tmp_path, capsys, monkeypatch, file):
    fill_disk(tmp_path / "runs" / "run" / file, monkeypatch)
    arguments = ["--config", str(finished.folder / "saved.yaml"), f"--config.save_dir={tmp_path / 'runs'}"]
    changes = ["--config.test.at_start=True", "--config.test.save_eval_images=True"]  # no resume: it would read the file
    assert load_script("train").main([*arguments, *changes]) in (2, 3)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(("error: ", "stopped: ")) and "No space left on device" in error, error
    assert error.startswith("error: the disk is full")


@pytest.mark.parametrize(("script", "file"), [("evaluate", "1.png"), ("evaluate", "results.json"), ("generate", "1.png")])
def test_a_full_disk_ends_a_script_with_its_name(finished, tmp_path, capsys, monkeypatch, script, file):
    fill_disk(tmp_path / "out" / file, monkeypatch)
    arguments = ["--config", str(finished.folder / "saved.yaml"), "--output", str(tmp_path / "out")]
    arguments += ["--prompt", "a cat"] if script == "generate" else ["--config.test.save_eval_images=True"]
    assert load_script(script).main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the disk is full")
