"""How a run ends early, and what a resumed run may change."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from tiny_run import rows_of, tiny_options, train, write_prompts

from paco_grpo.checkpoint import files
from paco_grpo.options import ConfigError
from paco_grpo.policies import lora
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer, TrainingStopped

CALLS = {"images": 0, "fail_after": None}


def failing():
    """Brightness, until so many images were scored."""

    def score(images, items):
        CALLS["images"] += len(images)
        if CALLS["fail_after"] is not None and CALLS["images"] > CALLS["fail_after"]:
            raise RuntimeError("the reward broke")
        return np.array([np.asarray(image, dtype=np.float64).mean() for image in images])

    return score


def no_scores():
    return lambda images, items: np.full(len(images), np.nan)


def negative():
    return lambda images, items: -np.arange(1.0, len(images) + 1)


def failing_aggregation(**rewards):
    raise ValueError("cannot join these")


def rewards(**weights):
    return repr({f"test_stops_and_resumes:{name}": weight for name, weight in weights.items()})


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Options name the rewards above by their module."""
    import sys

    monkeypatch.setitem(sys.modules, "test_stops_and_resumes", sys.modules[__name__])
    CALLS.update(images=0, fail_after=None)


def test_a_reward_that_fails_in_the_middle_of_an_epoch_stops_with_the_state_saved(tiny_flux_dir, tmp_path):
    """The second epoch of eight images: the first call of two images is good, the next one fails while sampling goes on."""
    CALLS["fail_after"] = 10
    options = tiny_options(tiny_flux_dir, tmp_path, train__reward_fn=rewards(failing=1), sample__batch_size=2,
                           sample__reward_batch_size=2, save_freq=0)  # fmt: skip
    with pytest.raises(TrainingStopped, match="the reward broke") as stopped:
        train(options)
    assert isinstance(stopped.value.__cause__ or stopped.value.__context__, ScoringError)
    assert [path.name for path in files.list_checkpoints(tmp_path / "runs/run/checkpoints")] == ["epoch_0001"]


def test_an_aggregation_that_fails_stops_with_the_state_saved(tiny_flux_dir, tmp_path):
    options = tiny_options(tiny_flux_dir, tmp_path, train__aggregate_fn="test_stops_and_resumes:failing_aggregation")
    with pytest.raises(TrainingStopped, match="aggregate_fn.*cannot join these"):
        train(options)
    assert files.list_checkpoints(tmp_path / "runs/run/checkpoints")


def test_rewards_of_weight_0_are_monitored_only(tiny_flux_dir, tmp_path):
    """They reach no aggregation (a negative one would be refused), and their missing scores leave no sample out."""
    changes = {"train__aggregate_fn": "geometric_mean_aggregate_fn", "num_epochs": 1}
    options = tiny_options(
        tiny_flux_dir, tmp_path, train__reward_fn=rewards(failing=1, negative=0, no_scores=0), **changes
    )
    train(options)
    (row,) = rows_of(options, "train")
    assert row["reward/negative_mean"] < 0 and row["advantage/dropped_share"] == 0
    with pytest.raises(ConfigError, match="reward_fn"):
        build_run(tiny_options(tiny_flux_dir, tmp_path / "b", train__reward_fn=rewards(failing=0)))


def test_the_tracker_is_closed_however_a_run_ends(tiny_flux_dir, tmp_path):
    closed = []
    CALLS["fail_after"] = 0
    trainer = Trainer(build_run(tiny_options(tiny_flux_dir, tmp_path, train__reward_fn=rewards(failing=1))))
    trainer.run.tracker = type("Tracker", (), {"close": lambda self: closed.append(1), "log": lambda *_: None})()
    with pytest.raises(TrainingStopped):
        trainer.fit()
    assert closed == [1]


def test_a_refused_start_leaves_no_folder_behind(tiny_flux_dir, tmp_path):
    for changes in ({"run_name": ""}, {}):
        options = tiny_options(tiny_flux_dir, tmp_path, train__reward_fn_kwargs="{}", **changes)
        with pytest.raises(Exception, match="nowhere"):
            build_run(dataclasses.replace(options, dataset=str(tmp_path / "nowhere")))
    assert list((tmp_path / "runs").glob("*")) == []
    mine = tmp_path / "runs" / "run" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("kept")
    with pytest.raises(Exception, match="nowhere"):
        build_run(dataclasses.replace(tiny_options(tiny_flux_dir, tmp_path), dataset=str(tmp_path / "nowhere")))
    assert mine.read_text() == "kept"


def test_a_lock_that_is_a_link_is_refused(tiny_flux_dir, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="link"):
        build_run(tiny_options(tiny_flux_dir, tmp_path))
    assert precious.read_text() == "mine"


def test_resuming_with_other_options(tiny_flux_dir, tmp_path, caplog):
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1)
    train(options)
    again = dataclasses.replace(options, resume_from="latest", num_epochs=2)
    louder = dataclasses.replace(again, train=dataclasses.replace(options.train, lora_alpha=64.0))
    with pytest.raises(ConfigError, match=r"lora_alpha.*16.*64.*resume_changed"):
        build_run(louder)
    nft = dataclasses.replace(options.train, loss_type="nft")
    prompts = write_prompts(tmp_path / "others", train=5)
    for changed in (dataclasses.replace(again, train=nft), dataclasses.replace(again, dataset=str(prompts))):
        with pytest.raises(ConfigError, match=r"config\.(dataset|train\.loss_type)"):
            build_run(changed)
    moved = (tmp_path / "prompts").rename(tmp_path / "moved")
    again, louder = (dataclasses.replace(one, dataset=str(moved)) for one in (again, louder))
    with caplog.at_level(logging.WARNING):
        run = build_run(dataclasses.replace(again, seed=7))
    run.close()
    assert "config.seed: 42 -> 7" in caplog.text and "lora_alpha" not in caplog.text.partition("seed")[2]
    build_run(dataclasses.replace(louder, resume_changed=True)).close()


def test_the_reference_may_be_the_adapter_that_training_starts_from(tiny_flux_dir, tmp_path):
    """Before the first update, the KL term and the distance to the reference are 0 with it, and not with the base."""
    first = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, train__learning_rate=0.1)
    train(first)
    adapter = tmp_path / "runs/run/checkpoints/epoch_0001/adapter"
    found = {}
    for reference in ("base", "start"):
        options = tiny_options(tiny_flux_dir, tmp_path, run_name=reference, train__lora_path=adapter,
                               train__reference=reference, train__beta=0.1)  # fmt: skip
        run = build_run(options)
        found[reference] = run.probe.measure()["health/velocity_change"]
        names = set(run.state.policy.transformer.peft_config)
        assert (lora.START in names) == (reference == "start")
        assert not any(f".{lora.START}." in name for name in run.state.parameters)
        run.close()
    assert found["start"] == 0 and found["base"] > 0
    with pytest.raises(ConfigError, match="lora_path"):
        build_run(tiny_options(tiny_flux_dir, tmp_path, train__reference="start"))


@pytest.mark.parametrize("loss_type", ["nft", "awm", "dgpo"])
def test_each_inner_epoch_draws_its_noise_anew(tiny_flux_dir, tmp_path, loss_type):
    from paco_grpo.objectives.forward import Noised

    changes = {"train__loss_type": loss_type, "train__num_inner_epochs": 2}
    if loss_type != "nft":
        changes |= {"train__num_sigmas": 1, "train__sigma_fraction": 1.0}
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    noises, original = [], Noised.__init__

    def spy(self, step, *arguments, **options):
        original(self, step, *arguments, **options)
        noises.append((step.inner_epoch, self.target.clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noised, "__init__", spy)
        trainer = Trainer(run)
        trainer.epoch()
    run.close()
    by_inner = [{tuple(row.flatten()[:4].tolist()) for n, target in noises for row in target if n == i} for i in (0, 1)]
    assert by_inner[0] and by_inner[1] and not by_inner[0] & by_inner[1]


def test_a_sigma_between_the_steps_has_its_own_noise(tiny_flux_dir, tmp_path):
    from paco_grpo.objectives.base import Step
    from paco_grpo.objectives.forward import Noised

    run = build_run(tiny_options(tiny_flux_dir, tmp_path))
    clean = torch.zeros(1, 4, 8)
    rollout = type("R", (), {"clean_latents": clean, "seeds": torch.tensor([3]), "item_ids": torch.tensor([0]),
                             "conditioning": None, "height": 16, "width": 16, "__len__": lambda self: 1})()  # fmt: skip
    targets = [Noised(Step(rollout, sigma, torch.zeros(1)), run.state.policy).target for sigma in (0.25, 0.5)]
    run.close()
    assert not torch.equal(*targets)
