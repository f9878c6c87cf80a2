"""How a run ends early, and what a resumed run may change."""

import dataclasses
import logging

import pytest
from tiny_run import rows_of, tiny_options, train, write_prompts

from paco_grpo.data.sets import prompt_sets
from paco_grpo.options import ConfigError
from paco_grpo.policies import lora
from paco_grpo.training.build import build_run
from paco_grpo.training.resume import find_earlier
from paco_grpo.training.trainer import Trainer


def rewards(**weights):
    return repr({f"reward_factories:{name}": weight for name, weight in weights.items()})


def test_rewards_of_weight_0_are_monitored_only(tiny_flux_dir, tmp_path, caplog):
    """They reach no aggregation (a negative one would be refused), and a missing score or a failure
    leaves no sample out. Agreement (3 n and 1 − n / 2 of prompt n) is measured on open prompts: 0, 1, 2.
    """
    write_prompts(tmp_path / "prompts", first_open=3)
    trained = {"gaps": 1, "negative": 0, "no_scores": 0, "failing": 0}
    trained |= {"oracle_consistency": 0, "oracle_between_images": 0}
    breaks = {"reward_factories:failing": {"after": 2}}
    other = "reward_factories:unlike_others"  # of evaluations alone
    fails = breaks | {other: {"unscored": "1test 1x2 grid. [LEFT]: a1. [RIGHT]: b1."}}
    watched = {"reward_factories:failing": 0.0, other: 0.0, "tiny_run:brightness": 1.0}
    options = tiny_options(
        tiny_flux_dir,
        tmp_path,
        num_epochs=1,
        train__aggregate_fn="geometric_mean_aggregate_fn",
        sample__unique_sample_num_per_epoch=4,
        train__reward_fn=rewards(**trained),
        train__reward_fn_kwargs=breaks,
        train__max_missing_reward_fraction=0.6,
        test__reward_fn=repr(watched),
        test__reward_fn_kwargs=fails,
    )
    train(options)
    (row,) = rows_of(options, "train")
    assert row["reward/negative_mean"] < 0 and row["advantage/dropped_share"] == 0.5
    variation = row["reward/negative_std"] / -row["reward/negative_mean"]
    assert row["reward/negative_cv"] == pytest.approx(variation)
    assert row["reward/within_minus_between"] == pytest.approx(2.5)
    assert caplog.text.count("failing has weight 0") == 2  # in training and evaluation
    assert caplog.text.count("unlike_others has weight 0") == 1
    with pytest.raises(ConfigError, match="reward_fn"):
        build_run(tiny_options(tiny_flux_dir, tmp_path / "b", train__reward_fn=rewards(failing=0)))


# With which the weights of a checkpoint mean something else.
OTHER_WEIGHTS = {
    "seed": 7,  # half of the random streams would go on with the old one
    "pretrained__model": "another",
    "use_lora": False,
    "train__loss_type": "nft",
    "train__loss_kwargs": {"a": 1},
    "train__lora_rank": 4,
    "train__lora_alpha": 64,
    "train__lora_targets": "attention",
    "train__lora_path": "of the test",
    "train__reference": "start",
    "train__use_8bit_adam": True,
}


def test_resuming_with_other_options(tiny_flux_dir, tmp_path, caplog):
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1)
    train(options)
    adapter = tmp_path / "runs" / "run" / "checkpoints" / "epoch_0001"
    changes = OTHER_WEIGHTS | {"resume_from": "latest", "train__lora_path": str(adapter)}
    changed = tiny_options(tiny_flux_dir, tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"lora_alpha \(16.* -> 64.*resume_changed") as refused:
        find_earlier(changed, prompt_sets(changed), tmp_path / "runs" / "run")
    for name in OTHER_WEIGHTS:
        assert f"config.{name.replace('__', '.')} (" in str(refused.value)
    again = dataclasses.replace(options, resume_from="latest", num_epochs=2)
    louder = dataclasses.replace(again, train=dataclasses.replace(options.train, lora_alpha=64.0))
    moved = (tmp_path / "prompts").rename(tmp_path / "moved")
    other_seed = dataclasses.replace(
        louder, dataset=str(moved), resume_changed=True, seed=7, save_freq=7
    )
    with caplog.at_level(logging.WARNING):
        build_run(other_seed).close()
    assert "config.save_freq: 1 -> 7" in caplog.text
    run = train(other_seed).run
    assert run.state.epoch == 2 and run.sampler.groups.seed == 7


@pytest.mark.parametrize("objective", ["ppo", "awm"])
def test_the_reference_may_be_the_adapter_that_training_starts_from(
    tiny_flux_dir, trained_run, tmp_path, objective
):
    """Until the first update, the distance to the reference and the KL are 0 with it, and not with
    the base.
    """
    adapter = trained_run.folder / "checkpoints" / "epoch_0002" / "adapter"
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
