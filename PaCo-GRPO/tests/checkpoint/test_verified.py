"""A checkpoint is verified before weights are loaded: changed bytes, files of another epoch."""

import json
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file
from tiny_run import tiny_options

from paco_grpo.checkpoint import files as ckpt
from paco_grpo.checkpoint.files import CheckpointError
from paco_grpo.checkpoint.state import verify
from paco_grpo.training.build import build_run
from paco_grpo.training.resume import load_state
from paco_grpo.training.trainer import Trainer


@pytest.fixture
def folder(trained_run, tmp_path):
    """A copy of a run with two checkpoints."""
    return shutil.copytree(trained_run.folder, tmp_path / "runs" / "run")


def flip(name, place):
    def damage(state):
        content = bytearray((state / name).read_bytes())
        content[place] ^= 0x40
        (state / name).write_bytes(content)

    return damage


def not_finite(name):
    def damage(state):
        tensors = load_file(state / name)
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        save_file(tensors, state / name)

    return damage


def of_epoch_1(name):
    return lambda state: shutil.copy(state.parents[1] / "epoch_0001/state" / name, state / name)


def exchanged(state):
    (state / "trainable.safetensors").rename(state / "other")
    (state / "ema.safetensors").rename(state / "trainable.safetensors")
    (state / "other").rename(state / "ema.safetensors")


def number(**changes):
    def damage(state):
        path = state / "trainer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def written(name, content):
    return lambda state: (state / name).write_bytes(content)


def removed(name):
    return lambda state: (state / name).unlink()


def in_place_of(name):
    def damage(state):
        (state / name).unlink()
        (state / name).mkdir()

    return damage


PARTS = ("trainable.safetensors", "optimizer.safetensors", "ema.safetensors")
NUMBERS = {
    "seed": number(sampler={"epoch": 2, "seed": 7}),
    "step": number(step=40),
    "step_nan": number(step=float("nan")),
    "step_true": number(step=True),
    "epoch_x": number(epoch="x"),
    "epoch_1": number(epoch=1),
    "sampler_1": number(sampler={"epoch": 1, "seed": 42}),
    "sampler_list": number(sampler=[2, 42]),
    "seconds": number(train_seconds=-1),
    "recompute": number(recompute_old="yes"),
    "of_epoch_1": of_epoch_1("trainer.json"),
    "empty": written("trainer.json", b""),
    "half": written("trainer.json", b'{"epoch": 2, "st'),
    "list": written("trainer.json", b"[1]"),
    "nested": written("trainer.json", b"[" * 100_000),
    "latin": written("trainer.json", b'{"epoch": "\xe9"}'),
    "gone": removed("trainer.json"),
    "folder": in_place_of("trainer.json"),
}
DAMAGES = {
    **{f"bit_{name}": flip(name, -1) for name in PARTS},
    **{f"header_{name}": flip(name, 9) for name in PARTS},
    **{f"nan_{name}": not_finite(name) for name in PARTS},
    **{f"older_{name}": of_epoch_1(name) for name in PARTS},
    **{f"gone_{name}": removed(name) for name in PARTS},
    **{f"empty_{name}": written(name, b"") for name in PARTS},
    "exchanged": exchanged,
    "no_moments": lambda state: save_file({}, state / "optimizer.safetensors"),
    "no_hashes": removed(ckpt.HASHES_FILE),
    "half_a_hash": written(ckpt.HASHES_FILE, b"1234"),
    "empty_hashes": written(ckpt.HASHES_FILE, b""),
    "hashes_elsewhere": written(ckpt.HASHES_FILE, b"0" * 64 + b"  ../../x"),
    **NUMBERS,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_with_the_checkpoint_before(folder, damage):
    newest = folder / "checkpoints" / "epoch_0002"
    verify(newest)
    DAMAGES[damage](newest / "state")
    with pytest.raises(CheckpointError) as caught:
        verify(newest)
    message = str(caught.value)
    assert message.startswith(f"cannot resume from {newest}: it is damaged") and "\n" not in message
    assert message.endswith(f"--config.resume_from={newest.with_name('epoch_0001')}")
    assert ckpt.find_checkpoint("latest", folder) == newest  # not silently the one before


def test_a_damaged_checkpoint_before_is_not_offered(folder):
    for name in ("epoch_0001", "epoch_0002"):
        flip("ema.safetensors", -1)(folder / "checkpoints" / name / "state")
    with pytest.raises(CheckpointError, match="ema.safetensors was changed") as caught:
        verify(folder / "checkpoints" / "epoch_0002")
    assert "--config.resume_from" not in str(caught.value)


def test_weights_are_not_loaded_for_a_damaged_checkpoint(
    folder, tiny_flux_dir, tmp_path, monkeypatch
):
    flip("optimizer.safetensors", -1)(folder / "checkpoints/epoch_0002/state")
    monkeypatch.setattr("paco_grpo.training.build.load_generator", lambda *_: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match="optimizer.safetensors was changed"):
        build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest", num_epochs=3))


def without_hashes(folder):
    """As checkpoints were before they had hashes."""
    state = folder / "checkpoints" / "epoch_0002" / "state"
    (state / ckpt.HASHES_FILE).unlink()
    numbers = json.loads((state / "trainer.json").read_text())
    del numbers["format"]
    (state / "trainer.json").write_text(json.dumps(numbers))
    return state


def test_a_checkpoint_without_hashes_is_a_warning(folder, tiny_flux_dir, tmp_path, caplog):
    without_hashes(folder)
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest"))
    load_state(run)
    run.close()
    assert "without hashes" in caplog.text and run.state.epoch == 2


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        *((not_finite(name), f"{name}: .* is not finite") for name in PARTS),
        (DAMAGES["no_moments"], "optimizer.safetensors lacks the moments"),
    ],
)
def test_without_hashes_content_is_still_checked(folder, tiny_flux_dir, tmp_path, damage, named):
    damage(without_hashes(folder))
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest"))
    with pytest.raises(CheckpointError, match=named):
        Trainer(run).fit()


def test_half_of_the_moments_are_refused(folder, tiny_flux_dir, tmp_path):
    path = without_hashes(folder) / "optimizer.safetensors"
    moments = load_file(path)
    del moments["0.exp_avg_sq"]
    save_file(moments, path)
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest"))
    with pytest.raises(CheckpointError, match=r"lacks 0\.exp_avg_sq"):
        Trainer(run).fit()


def test_the_hashes_are_as_sha256sum_reads_them(folder):
    state = folder / "checkpoints" / "epoch_0002" / "state"
    subprocess.run(["sha256sum", "--quiet", "-c", ckpt.HASHES_FILE], cwd=state, check=True)


def write_checkpoint(root, epoch):
    (root / ckpt.checkpoint_name(epoch) / "state").mkdir(parents=True)


def test_half_removed_and_half_written_checkpoints_go(tmp_path):
    """What a kill leaves.

    Of an earlier version a checkpoint without trainer.json, of this one a hidden folder.
    """
    for epoch in (1, 2, 3):
        write_checkpoint(tmp_path, epoch)
    for name in (".epoch_0000.removed", ".epoch_0004.partial"):
        (tmp_path / name / "state").mkdir(parents=True)
    ckpt.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0002", "epoch_0003"]


def test_a_kill_while_removing_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for epoch in (1, 2):
        write_checkpoint(tmp_path, epoch)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before anything is removed
        ckpt.prune(tmp_path, 1)
    assert [path.name for path in ckpt.list_checkpoints(tmp_path)] == ["epoch_0002"]
    ckpt.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0002"]


def test_saving_again_replaces_a_checkpoint(tmp_path):
    for content in ("old", "new"):
        ckpt.begin(tmp_path / ".epoch_0001.partial")
        (tmp_path / ".epoch_0001.partial" / "state" / "x").write_text(content)
        ckpt.commit(tmp_path / ".epoch_0001.partial", tmp_path / "epoch_0001")
    assert (tmp_path / "epoch_0001" / "state" / "x").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1
