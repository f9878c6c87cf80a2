"""Checkpoint folders and files, and the average of the weights."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from paco_grpo.training import checkpoints as ckpt


def write_checkpoint(root, epoch):
    (root / ckpt.checkpoint_name(epoch) / "state").mkdir(parents=True)
    (root / ckpt.checkpoint_name(epoch) / "state" / "trainer.json").write_text("{}")


def test_the_newest_checkpoints_are_kept_by_number(tmp_path):
    for epoch in (9, 10000, 9999, 2):
        write_checkpoint(tmp_path, epoch)
    for name in ("epoch_0001_keep", "epoch_"):  # the user's own
        shutil.copytree(tmp_path / "epoch_0009", tmp_path / name)
    (tmp_path / ".epoch_0099.partial" / "state").mkdir(parents=True)
    (tmp_path / "epoch_0050").mkdir()  # without state: not finished by us
    ckpt.prune(tmp_path, 2)
    assert not (tmp_path / ".epoch_0099.partial").exists()
    assert [path.name for path in ckpt.list_checkpoints(tmp_path)] == ["epoch_9999", "epoch_10000"]
    assert (tmp_path / "epoch_0001_keep").is_dir()


def test_finding_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert ckpt.find_checkpoint("latest", run) is None
    for epoch in (3, 4):
        write_checkpoint(run / "checkpoints", epoch)
    newest = run / "checkpoints" / "epoch_0004"
    for name in ("config.yaml", "plan.json"):
        with pytest.raises(ckpt.CheckpointError, match=f"has no {name}.*lora_path"):
            ckpt.find_checkpoint("latest", run)
        (run / name).touch()
    assert ckpt.find_checkpoint("latest", run) == newest
    assert ckpt.find_checkpoint(str(run), tmp_path) == newest
    assert ckpt.find_checkpoint(str(run / "checkpoints" / "epoch_0003"), run).name == "epoch_0003"
    (tmp_path / "link").symlink_to(run / "checkpoints")
    assert ckpt.find_checkpoint(str(tmp_path / "link" / "epoch_0003"), run).parents[1] == run
    for missing in ("nothing", 5000 * "n"):
        with pytest.raises(ckpt.CheckpointError, match=f"{missing}' holds no"):
            ckpt.find_checkpoint(str(tmp_path / missing), run)


def test_other_weights_are_not_loaded(tmp_path):
    save_file({"w": torch.ones(1, 2)}, tmp_path / "ema.safetensors")
    for tensors in ({"w": torch.zeros(2, 2)}, {}):  # the first would be broadcast
        with pytest.raises(ckpt.CheckpointError, match=r"ema\.safetensors"):
            ckpt.load_into(tmp_path / "ema.safetensors", tensors)
