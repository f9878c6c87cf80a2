"""Checkpoint folders and files, and the average of the weights."""

import shutil

import numpy as np
import pytest
import torch

from paco_grpo.checkpoint import files as ckpt
from paco_grpo.checkpoint.state import EMA, capture_rng, restore_rng
from paco_grpo.distributed.processes import Replicated


@pytest.mark.parametrize(("interval", "limit"), [(1, 0.9), (3, 0.2)])
def test_ema_against_numpy(interval, limit):
    rng = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.from_numpy(rng.normal(size=4)).float())
    ema = EMA({"w": parameter}, limit, interval)
    expected = parameter.detach().numpy().astype(np.float64)
    for step in range(1, 20):
        weights = rng.normal(size=4)
        parameter.data = torch.from_numpy(weights).float()
        ema.update(step)
        if step % interval == 0:
            decay = min((1 + step) / (10 + step), limit)
            expected = decay * expected + (1 - decay) * weights
    np.testing.assert_allclose(ema.shadow["w"].numpy(), expected, rtol=1e-5)
    before = parameter.detach().clone()
    with ema.applied():
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5)
    assert torch.equal(parameter, before)


def write_checkpoint(root, epoch):
    (root / ckpt.checkpoint_name(epoch) / "state").mkdir(parents=True)
    (root / ckpt.checkpoint_name(epoch) / "state" / "trainer.json").write_text("{}")


def test_the_newest_checkpoints_are_kept_by_number(tmp_path):
    for epoch in (9, 10000, 11, 2):
        write_checkpoint(tmp_path, epoch)
    for name in ("epoch_0001_keep", "epoch_"):  # the user's own
        shutil.copytree(tmp_path / "epoch_0009", tmp_path / name)
    (tmp_path / ".epoch_0099.partial" / "state").mkdir(parents=True)
    (tmp_path / "epoch_0050").mkdir()  # without state: not finished by us
    ckpt.prune(tmp_path, 2)
    assert [path.name for path in ckpt.list_checkpoints(tmp_path)] == ["epoch_0011", "epoch_10000"]
    assert (tmp_path / "epoch_0001_keep").is_dir() and ckpt.archive_superseded(tmp_path, 10**6) == []


def test_finding_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert ckpt.find_checkpoint("latest", run) is None
    for epoch in (3, 4):
        write_checkpoint(run / "checkpoints", epoch)
    newest = run / "checkpoints" / "epoch_0004"
    assert ckpt.find_checkpoint("latest", run) == newest
    assert ckpt.find_checkpoint(str(run), tmp_path) == newest
    assert ckpt.find_checkpoint(str(run / "checkpoints" / "epoch_0003"), run).name == "epoch_0003"
    with pytest.raises(ckpt.CheckpointError, match="nothing"):
        ckpt.find_checkpoint(str(tmp_path / "nothing"), run)


def test_an_epoch_written_again_replaces_the_old_one(tmp_path):
    for text in ("old", "new"):
        writer = ckpt.CheckpointWriter(tmp_path, "epoch_0001")
        writer.begin()
        (writer.folder / "state" / "trainer.json").write_text(text)
        writer.commit()
    assert (tmp_path / "epoch_0001" / "state" / "trainer.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0001"]


def test_random_generators_are_restored(tmp_path):
    torch.manual_seed(3)
    np.random.seed(3)
    ckpt.save_json(tmp_path / "rng_0.json", capture_rng())
    numbers = torch.rand(3), np.random.rand(3)
    restore_rng(ckpt.load_json(tmp_path / "rng_0.json"))
    assert torch.equal(torch.rand(3), numbers[0])
    assert np.array_equal(np.random.rand(3), numbers[1])


def test_optimizer_state_is_restored(tmp_path):
    torch.manual_seed(0)
    gradients = [[torch.randn(3), torch.randn(2, 2)] for _ in range(2)]

    def step(parameters, optimizer, number):
        for parameter, gradient in zip(parameters, gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    one = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(one, lr=0.1, betas=(0.8, 0.9))
    step(one, optimizer, 0)
    ckpt.save_optimizer(tmp_path, optimizer.state_dict())
    two = [torch.nn.Parameter(parameter.detach().clone()) for parameter in one]
    restored = torch.optim.AdamW(two, lr=0.5)
    Replicated(None).load_optimizer_state(restored, ckpt.load_optimizer(tmp_path))
    step(one, optimizer, 1)
    step(two, restored, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_resumed(tmp_path, value):
    ckpt.save_tensors(tmp_path / "trainable.safetensors", {"w": torch.tensor([1.0, value])})
    with pytest.raises(ckpt.CheckpointError, match=r"trainable\.safetensors: w"):
        ckpt.load_parameters(tmp_path / "trainable.safetensors", {"w": torch.zeros(2)})
