"""Whole runs on tiny weights: what is written, what stops them, and that resuming changes
nothing.
"""

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from forked_runs import state
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import rows_of, tiny_options, train

from paco_grpo.objectives import MicroBatch
from paco_grpo.options import ConfigError
from paco_grpo.training import checkpoints as ckpt
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer

THREE_EPOCHS = {"num_epochs": 3, "train__gradient_step_per_epoch": 2, "train__batch_size": 2}


def folder_of(config) -> Path:
    return Path(config.save_dir) / config.run_name


@pytest.fixture(scope="module")
def finished(tiny_flux_dir, tmp_path_factory):
    """Three epochs without interruption, with evaluations; read only."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_options(
        tiny_flux_dir,
        folder,
        logging_platform="tensorboard",
        eval_freq=2,
        **THREE_EPOCHS,
    )
    train(config)
    return config


def test_the_tracker_gets_each_epochs_numbers_and_pictures(finished):
    folder = folder_of(finished)
    events = EventAccumulator(str(folder / "tensorboard"), {"images": 0})
    events.Reload()
    for event, row in zip(events.Scalars("train/loss"), rows_of(finished, "train"), strict=True):
        assert (event.step, event.value) == (row["epoch"], pytest.approx(row["train/loss"]))
    captions = events.Tensors("eval/images/1_caption/text_summary")
    assert captions[0].tensor_proto.string_val[0].startswith(b"1test 1x2 grid")
    sheets = events.Images("eval/sheet")
    assert [event.step for event in sheets] == [0, 2, 3]
    for event in sheets:
        logged = Image.open(io.BytesIO(event.encoded_image_string))
        file = folder / "eval" / ckpt.checkpoint_name(event.step) / "sheet.png"
        assert logged.tobytes() == Image.open(file).tobytes()
    assert len({event.encoded_image_string for event in sheets}) == 3


@pytest.mark.parametrize("step", [1, 2])
def test_a_signal_within_an_update(finished, tiny_flux_dir, tmp_path, monkeypatch, step):
    """Before the epoch's first optimizer step it stops at the next micro-batch, later the epoch is
    finished.
    """
    changes = THREE_EPOCHS | {"save_freq": 0}
    stopped = tiny_options(tiny_flux_dir, tmp_path, **changes)
    calls = []
    steps = MicroBatch.build_steps

    def signal_then_steps(*arguments):
        calls.append(1)
        if (
            len(calls) == 3 + 2 * step
        ):  # four micro-batches an epoch; the first of this optimizer step, in epoch 2
            os.kill(os.getpid(), signal.SIGTERM)
        return steps(*arguments)

    command = "--config.run_name=run --config.resume_from=latest"
    with monkeypatch.context() as patch, pytest.raises(TrainingStopped, match=command) as caught:
        patch.setattr(MicroBatch, "build_steps", signal_then_steps)
        train(stopped)
    assert caught.value.signal_number == signal.SIGTERM
    assert len(calls) == (5 if step == 1 else 8)
    names = [path.name for path in ckpt.list_checkpoints(folder_of(stopped) / "checkpoints")]
    assert names == ["epoch_0001" if step == 1 else "epoch_0002"]
    train(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest", **changes))
    assert state(tmp_path, 3) == state(folder_of(finished).parents[1], 3)


def test_a_folder_that_holds_a_run_is_not_overwritten(finished):
    with pytest.raises(ConfigError, match="already holds a run.*resume_from=latest"):
        build_run(finished)


def test_training_time_limit_stops_cleanly(tiny_flux_dir, tmp_path):
    """It is in minutes: one more epoch begins after 59.99 seconds."""
    config = tiny_options(tiny_flux_dir, tmp_path, num_epochs=50, max_train_minutes=1, save_freq=0)
    run = build_run(config)
    run.state.train_seconds = 59.99
    Trainer(run).fit()
    assert [row["phase"] for row in rows_of(config)] == ["train", "eval"]
    assert (folder_of(config) / "checkpoints" / "epoch_0001" / "adapter").is_dir()


def test_non_finite_numbers_stop_before_the_update(tiny_flux_dir, tmp_path):
    config = tiny_options(tiny_flux_dir, tmp_path)
    run = build_run(config)
    before = {n: p.detach().clone() for n, p in run.state.parameters.items()}
    next(iter(run.state.parameters.values())).register_hook(
        lambda gradient: gradient * float("inf")
    )
    with pytest.raises(TrainingStopped, match="gradient .*epoch 1"):
        Trainer(run).fit()
    assert all(torch.equal(before[n], p) for n, p in run.state.parameters.items())
    assert (folder_of(config) / "checkpoints" / "stopped_epoch_0001" / "state").is_dir()
    assert ckpt.list_checkpoints(folder_of(config) / "checkpoints") == []


def test_weights_that_are_not_finite_are_not_saved(tiny_flux_dir, tmp_path):
    """The gradients are finite, but the second epoch's weights are not, because of Adam's
    moments.
    """
    config = tiny_options(tiny_flux_dir, tmp_path)
    run = build_run(config)

    def spoil(*_) -> None:
        if run.state.epoch == 1:
            next(iter(run.state.optimizer.state.values()))["exp_avg"].fill_(float("nan"))

    next(iter(run.state.parameters.values())).register_hook(spoil)
    with pytest.raises(TrainingStopped, match="weights"):
        Trainer(run).fit()
    assert [path.name for path in (folder_of(config) / "checkpoints").iterdir()] == ["epoch_0001"]
