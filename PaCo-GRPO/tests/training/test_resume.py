"""What a resumed run continues, and what it refuses to continue."""

import dataclasses
import json
import shutil

import pytest
import torch
from fakes import fake_judge
from tiny_run import rows_of, tiny_options, train

from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run, record_start
from paco_grpo.training.checkpoints import CheckpointError
from paco_grpo.training.resume import load_state
from paco_grpo.training.trainer import Trainer
from paco_judge.errors import UserError
from paco_judge.files import locked
from paco_judge.identity import Match


@pytest.fixture
def folder(trained_run, tmp_path):
    """A copy of a run with two checkpoints."""
    shutil.copytree(trained_run.options.dataset, tmp_path / "prompts")
    return shutil.copytree(trained_run.folder, tmp_path / "runs" / "run")


@pytest.fixture
def again(tiny_flux_dir, tmp_path):
    """Options that resume the run in ``folder``."""

    def of(**changes):
        changes = {"resume_from": "latest", "train__learning_rate": 0.05} | changes
        return tiny_options(tiny_flux_dir, tmp_path, **changes)

    return of


def assert_equal(saved, loaded):
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        if isinstance(value, dict):
            assert_equal(value, loaded[name])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(loaded[name])), name


@pytest.mark.parametrize("changes", [{}, {"train__use_8bit_adam": True, "train__lora_rank": 64}])
def test_everything_is_continued(tiny_flux_dir, tmp_path, changes):
    """All numbers differ. The learning rate comes from the options, not from the checkpoint."""
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, **changes)
    first = train(options).run
    state = first.state
    state.epoch = 5
    state.optimizer_steps = 7
    state.train_seconds = 12.5
    state.must_recompute = True
    with torch.no_grad():
        for name in first.state.ema.shadow:
            first.state.ema.shadow[name] += 1
    first.checkpoints.save()

    changes = changes | {"train__learning_rate": 0.25, "resume_from": "latest"}
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    load_state(run)
    run.close()
    numbers = (run.state.epoch, run.state.optimizer_steps, run.state.train_seconds)
    assert numbers == (5, 7, 12.5)
    assert run.state.must_recompute is True
    assert_equal(first.state.weights(), run.state.weights())
    saved = first.state.optimizer.state_dict()["state"]
    assert len(saved) == len(run.state.parameters)
    assert_equal(saved, run.state.optimizer.state_dict()["state"])
    assert [group["lr"] for group in run.state.optimizer.param_groups] == [0.25]
    (run.resumes_from / "state" / "ema.safetensors").unlink()  # as if it had been off
    load_state(run)
    assert_equal(first.state.weights()["trainable"], run.state.ema.shadow)


def test_what_cannot_continue_a_run_leaves_its_configuration(folder, again):
    before = {name: (folder / name).read_text() for name in ("config.yaml", "plan.json")}
    with pytest.raises(CheckpointError, match="other weights"):
        train(again(train__lora_rank=3, resume_changed=True))
    assert before == {name: (folder / name).read_text() for name in before}


def test_copies_that_a_checkpoint_lacks_start_from_its_weights(folder, again):
    """Another objective keeps other copies, as the same one does with other options."""
    awm = {"train__loss_type": "awm", "train__num_inner_epochs": 2, "train__num_sigmas": 1}
    with pytest.raises(ConfigError, match="train.loss_type"):
        build_run(again(**awm))
    run = build_run(again(**awm, resume_changed=True))
    load_state(run)
    run.close()
    trained, old, slow, _ = (list(part.values()) for part in run.state.weights().values())
    assert all(map(torch.equal, trained, old)) and all(map(torch.equal, trained, slow))
    assert any(tensor.any() for tensor in run.state.snapshots["old"].values())


def test_how_images_are_sampled_belongs_to_a_run(tiny_flux_dir, tmp_path, again, caplog):
    """Also in a run from before 0.7, whose config.yaml has sample.cps."""
    cps = {"sample__transition": "cps", "train__learning_rate": 0.05}
    old = train(tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, **cps)).run
    file = old.folder / "config.yaml"
    text = file.read_text()
    assert "  transition: cps\n" in text
    file.write_text(text.replace("  transition: cps\n", "  cps: true\n"))
    for name, value in (("transition", "dance_sde"), ("window_epochs", 2), ("window_stride", 3)):
        changes = {"sample__num_noise_steps": 1, "sample__transition": "cps"}
        changes |= {f"sample__{name}": value}
        with pytest.raises(ConfigError, match=f"other values of config.sample.{name}"):
            build_run(again(**changes))
    caplog.clear()
    resumed = train(again(sample__transition="cps")).run
    assert resumed.state.epoch == 2 and "sample.transition" not in caplog.text
    card = resumed.folder / "checkpoints" / "epoch_0002" / "adapter" / "README.md"
    assert all("  transition: cps\n" in place.read_text() for place in (file, card))


def test_an_average_that_has_not_moved_is_said(tiny_flux_dir, tmp_path, caplog):
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, train__ema_update_interval=3))
    for run.state.optimizer_steps in (0, 2, 3):
        run.checkpoints.save()
    run.close()
    assert caplog.text.count("ema_update_interval") == 1 and "after 2 " in caplog.text


def test_a_run_that_was_stopped_before_its_first_step(tiny_flux_dir, tmp_path):
    """Saving does not touch the optimizer, whose first step is then its first one."""
    run = build_run(tiny_options(tiny_flux_dir, tmp_path))
    record_start(run)
    run.checkpoints.save()
    assert not run.state.optimizer.state
    run.close()
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest"))
    load_state(run)
    run.close()
    assert not run.state.optimizer.state


@pytest.mark.parametrize(
    ("file", "option"),
    [
        ("flux/scheduler/scheduler_config.json", "pretrained.model"),
        ("prompts/train_metadata.jsonl", "dataset"),
    ],
)
def test_other_files_in_the_same_folders_are_refused(
    folder, again, tiny_flux_dir, tmp_path, file, option
):
    """Which changes an identity sees: paco-judge's tests."""
    flux = shutil.copytree(tiny_flux_dir, tmp_path / "flux")
    build_run(again(pretrained__model=flux, resume_changed=True)).close()
    with (tmp_path / file).open("a") as content:
        content.write("\n")
    with pytest.raises(ConfigError, match=rf"config\.{option} .*resume_changed"):
        build_run(again(pretrained__model=flux))


@pytest.mark.parametrize("trace", ["metrics.jsonl", "eval"])
def test_a_folder_with_rows_of_its_own_is_not_continued_from_another_run(
    folder, again, tmp_path, trace
):
    """Its rows would stand before those of the other run; it may have died before it saved."""
    other = tmp_path / "runs" / "died"
    other.mkdir()
    (folder / trace).rename(other / trace)
    checkpoint = folder / "checkpoints" / "epoch_0001"
    with pytest.raises(ConfigError, match="died already holds a run"):
        build_run(again(run_name="died", resume_from=checkpoint))
    run = build_run(again(run_name="fresh", resume_from=checkpoint))
    run.close()
    assert run.resumes_from == checkpoint
    build_run(again(run_name="run", resume_from=checkpoint)).close()  # its own


def test_a_judge_exchanged_under_its_name_is_refused(tiny_flux_dir, tmp_path, caplog):
    """Unless on purpose. If the server does not say, the run says so and goes on."""
    with fake_judge.FakeJudge() as server:
        judge = {"consistency_score": {"base_url": server.url}}
        rewards = {"consistency_score": 1.0}
        changes = {"train__reward_fn": rewards, "train__reward_fn_kwargs": judge}
        server.identities = {"Paco-Reward-7B": "o/a@1"}
        run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
        record_start(run)
        run.checkpoints.save()
        run.close()
        asked = json.loads((run.folder / "questions.json").read_text())
        assert asked["consistency_score"]["weights"] == "o/a@1"
        options = tiny_options(tiny_flux_dir, tmp_path, **changes, resume_from="latest")
        build_run(options).close()
        server.identities = {"Paco-Reward-7B": "o/a@2"}
        with pytest.raises(ConfigError, match="the weights of consistency_score.*_changed"):
            build_run(options)
        build_run(dataclasses.replace(options, resume_changed=True)).close()
        assert "without knowing" not in caplog.text
        server.identities = {"Paco-Reward-7B": None}
        build_run(options).close()
        assert f"weights of consistency_score ({Match.UNKNOWN.value})" in caplog.text


def test_another_adapter_to_start_from_is_refused(tiny_flux_dir, trained_run, tmp_path):
    """Its place is the same. What the run trained since is in its checkpoint."""
    start = shutil.copytree(trained_run.folder / "checkpoints" / "epoch_0002", tmp_path / "start")
    changes = {"train__lora_path": start, "num_epochs": 1}
    train(tiny_options(tiny_flux_dir, tmp_path, **changes))
    changes |= {"resume_from": "latest", "num_epochs": 2}
    build_run(tiny_options(tiny_flux_dir, tmp_path, **changes)).close()
    other = trained_run.folder / "checkpoints" / "epoch_0001" / "adapter"
    shutil.copytree(other, start / "adapter", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="train.lora_path .* holds other files.*resume_changed"):
        build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))


def test_a_run_of_an_earlier_version_goes_on_with_a_line(folder, again, caplog):
    plan = json.loads((folder / "plan.json").read_text())
    del plan["identities"]
    plan["fingerprints"] = {"dataset": "sha256:12", "pretrained.model": None}
    (folder / "plan.json").write_text(json.dumps(plan))
    build_run(again()).close()
    assert "dataset (an earlier version wrote this" in caplog.text


def test_a_checkpoint_of_another_version_is_refused(folder, again):
    path = folder / "checkpoints" / "epoch_0002" / "state" / "trainer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="epoch_0002"):
        build_run(again())


def test_what_came_after_the_checkpoint_is_done_again(folder, again):
    shutil.rmtree(folder / "checkpoints" / "epoch_0002")
    train(again())
    assert [row["epoch"] for row in rows_of(again(), "train")] == [1, 2]
    assert (folder / "eval" / "replaced_epoch_0002").is_dir()
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"epoch_0001", "epoch_0002"}


def test_killed_before_the_first_checkpoint_begins_again_and_says_so(again, caplog):
    """The rows and evaluations of the first course are set aside, not lost."""
    options = again(resume_from="None", save_freq=5, eval_freq=1, num_epochs=3)
    run = build_run(options)
    trainer = Trainer(run)
    trainer.evaluations.evaluate_if_due()
    trainer.epoch()
    run.close()  # as after a kill
    trainer = train(again(save_freq=5, eval_freq=1, num_epochs=3))
    assert "no checkpoint" in caplog.text
    folder = trainer.run.folder
    assert len((folder / "replaced_metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "eval" / "replaced_epoch_0000").is_dir()
    assert [row["epoch"] for row in rows_of(options, "train")] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{"run_name": 300 * "n"}, {"save_dir": __file__}])
def test_a_folder_that_cannot_be_made_is_one_sentence(tiny_flux_dir, tmp_path, changes):
    with pytest.raises(UserError, match="config.run_name or config.save_dir"):
        build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))


def test_a_second_trainer_is_refused(tiny_flux_dir, tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    with locked(folder), pytest.raises(UserError, match="run"):
        build_run(tiny_options(tiny_flux_dir, tmp_path))
