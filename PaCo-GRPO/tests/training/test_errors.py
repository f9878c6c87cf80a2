"""What ends a run early: the finished epochs are saved, and the message says what to do."""

import dataclasses
import re

import pytest
import torch
from tiny_run import rows_of, tiny_edit_options, tiny_options, train

from paco_grpo.options import ConfigError
from paco_grpo.training import checkpoints as files
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer
from paco_judge.errors import UserError

LATE = {"save_freq": 0, "num_epochs": 3, "health__probe_images": 0, "test__num_images": 1}


def saved(folder):
    return [path.name for path in files.list_checkpoints(folder / "runs" / "run" / "checkpoints")]


def failing_at(call, error):
    """Raises ``error`` at call number ``call`` of the function that it wraps."""

    def wrap(function):
        calls = []

        def wrapped(*arguments, **keywords):
            calls.append(1)
            if len(calls) == call:
                raise error
            return function(*arguments, **keywords)

        return wrapped

    return wrap


def test_files_that_are_no_images_are_named_together_before_weights_are_loaded(
    tiny_folder, tmp_path
):
    options = tiny_edit_options(tiny_folder("flux_kontext"), tmp_path)
    prompts = tmp_path / "prompts"
    (prompts / "train1.png").write_bytes(b"")
    (prompts / "test2.png").write_bytes(b"GIF")
    with pytest.raises(UserError) as refused:
        build_run(options)
    for name in ("train_metadata.jsonl: row 2: .*train1.png", "test_metadata.jsonl: row 3: "):
        assert len(re.findall(name, str(refused.value))) == 1
    assert "train0.png" not in str(refused.value)


@pytest.mark.parametrize("eval_freq", [0, 1])
def test_cut_reference_images_end_the_first_epoch(tiny_folder, tmp_path, eval_freq):
    """One is drawn in the first evaluation, two in no epoch before the last."""
    changes = {"sample__unique_sample_num_per_epoch": 1, "num_epochs": 4, "save_freq": 0}
    options = tiny_edit_options(
        tiny_folder("flux_kontext"), tmp_path, **changes, eval_freq=eval_freq
    )
    run = build_run(options)
    drawn = [run.sampler.groups.samples(epoch).item_ids[0] for epoch in range(4)]
    names = ["test1.png", *(f"train{number}.png" for number in drawn[2:])]
    whole = {name: (tmp_path / "prompts" / name).read_bytes() for name in names}
    for name, content in whole.items():
        (tmp_path / "prompts" / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(TrainingStopped) as stopped:
        Trainer(run).fit()
    for name in names:
        assert str(stopped.value).count(f"({name!r})") == 1
    assert saved(tmp_path) == ["epoch_0000"]
    for name, content in whole.items():
        (tmp_path / "prompts" / name).write_bytes(content)
    options = dataclasses.replace(options, resume_from="latest")
    Trainer(build_run(options)).fit()


def test_out_of_memory_names_what_helps(tiny_flux_dir, tmp_path):
    """In the second of two optimizer steps of an epoch, whose weights belong to no epoch."""
    changes = LATE | {"train__gradient_step_per_epoch": 2}
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")
    run.objective.loss = failing_at(7, error)(run.objective.loss)  # of two micro-batches a step
    with pytest.raises(TrainingStopped) as stopped:
        Trainer(run).fit()
    assert "train.batch_size=3" in str(stopped.value)
    assert saved(tmp_path) == []


def test_a_defect_saves_what_is_finished_and_keeps_its_traceback(tiny_flux_dir, tmp_path, caplog):
    options = tiny_options(tiny_flux_dir, tmp_path, **LATE)
    run = build_run(options)
    run.objective.loss = failing_at(4, ZeroDivisionError("of mine"))(run.objective.loss)
    with pytest.raises(ZeroDivisionError, match="of mine"):
        Trainer(run).fit()
    assert saved(tmp_path) == ["epoch_0001"] and "epoch 1 is saved" in caplog.text
    resumed = train(dataclasses.replace(options, resume_from="latest")).run
    first, second, third = rows_of(options, "train")
    assert [row["epoch"] for row in (first, second, third)] == [1, 2, 3]
    for before, after in ((first, second), (second, third)):
        passed = after["train_time"] - before["train_time"]
        assert passed == pytest.approx(after["time/epoch_s"])
    assert resumed.state.train_seconds == third["train_time"] > 0


def test_variety_needs_open_prompts(tiny_flux_dir, tmp_path):
    options = tiny_options(tiny_flux_dir, tmp_path, train__reward_fn={"between_images": 1.0})
    with pytest.raises(ConfigError, match="between_images.* open"):
        build_run(options)
