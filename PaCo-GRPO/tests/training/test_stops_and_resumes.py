"""How a run ends early, and what a resumed run may change."""

import dataclasses
import logging

import pytest
from tiny_run import rows_of, tiny_options, train, write_prompts

from paco_grpo.checkpoint import files
from paco_grpo.options import ConfigError
from paco_grpo.policies import lora
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer


def rewards(**weights):
    return repr({f"reward_factories:{name}": weight for name, weight in weights.items()})


def test_a_reward_that_fails_in_the_middle_of_an_epoch_stops_with_the_state_saved(
    tiny_flux_dir, tmp_path
):
    """The second epoch of eight images: the first call of two images is good, the next one fails
    while sampling goes on.
    """
    options = tiny_options(
        tiny_flux_dir,
        tmp_path,
        train__reward_fn=rewards(failing=1),
        sample__batch_size=2,
        train__reward_fn_kwargs="{'reward_factories:failing': {'after': 10}}",
        sample__reward_batch_size=2,
        save_freq=0,
    )
    with pytest.raises(TrainingStopped, match="the reward broke at 2 images") as stopped:
        train(options)
    assert isinstance(stopped.value.__cause__ or stopped.value.__context__, ScoringError)
    assert [path.name for path in files.list_checkpoints(tmp_path / "runs/run/checkpoints")] == [
        "epoch_0001"
    ]


def test_rewards_of_weight_0_are_monitored_only(tiny_flux_dir, tmp_path):
    """They reach no aggregation (a negative one would be refused), and their missing scores leave
    no sample out.
    """
    options = tiny_options(
        tiny_flux_dir,
        tmp_path,
        num_epochs=1,
        train__aggregate_fn="geometric_mean_aggregate_fn",
        train__reward_fn=rewards(failing=1, negative=0, no_scores=0),
    )
    train(options)
    (row,) = rows_of(options, "train")
    assert row["reward/negative_mean"] < 0 and row["advantage/dropped_share"] == 0
    with pytest.raises(ConfigError, match="reward_fn"):
        build_run(tiny_options(tiny_flux_dir, tmp_path / "b", train__reward_fn=rewards(failing=0)))


def test_resuming_with_other_options(tiny_flux_dir, tmp_path, caplog):
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1)
    train(options)
    again = dataclasses.replace(options, resume_from="latest", num_epochs=2)
    louder = dataclasses.replace(again, train=dataclasses.replace(options.train, lora_alpha=64.0))
    with pytest.raises(ConfigError, match=r"lora_alpha.*16.*64.*resume_changed"):
        build_run(louder)
    prompts = write_prompts(tmp_path / "others", train=5)
    for name, value in (
        ("dataset", prompts),
        ("train__loss_type", "nft"),
        ("train__use_8bit_adam", True),
        ("seed", 7),  # half of the random streams would go on with 42
    ):
        with pytest.raises(ConfigError, match=f"another config.{name.replace('__', '.')} "):
            build_run(tiny_options(tiny_flux_dir, tmp_path, resume_from="latest", **{name: value}))
    moved = (tmp_path / "prompts").rename(tmp_path / "moved")
    other_seed = dataclasses.replace(
        louder, dataset=str(moved), resume_changed=True, seed=7, save_freq=7
    )
    with caplog.at_level(logging.WARNING):
        build_run(other_seed).close()
    assert "config.save_freq: 1 -> 7" in caplog.text
    run = train(other_seed).run
    assert run.state.epoch == 2 and run.state.sampler.seed == 7


@pytest.mark.parametrize("objective", ["ppo", "awm"])
def test_the_reference_may_be_the_adapter_that_training_starts_from(
    tiny_flux_dir, tmp_path, objective
):
    """Until the first update, the distance to the reference and the KL are 0 with it, and not with
    the base.
    """
    first = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, train__learning_rate=0.1)
    train(first)
    adapter = tmp_path / "runs/run/checkpoints/epoch_0001/adapter"
    found = {}
    for reference in ("base", "start"):
        options = tiny_options(
            tiny_flux_dir,
            tmp_path,
            run_name=reference,
            train__lora_path=adapter,
            train__timesteps=1,
            train__reference=reference,
            train__beta=0.1,
            train__loss_type=objective,
        )
        run = build_run(options)
        distance = run.probe.measure()["health/velocity_change"]
        assert not any(f".{lora.START}." in name for name in run.state.parameters)
        Trainer(run).epoch()
        run.close()
        found[reference] = distance, rows_of(options, "train")[0]["train/kl"]
    assert found["start"] == (0, 0) and min(found["base"]) > 0
