"""The update half of an epoch: its meter, and old log-probabilities of a resumed run."""

import dataclasses

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tiny_run import rows_of, sampled, tiny_options

from paco_grpo.training import sample as sampling
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer
from paco_grpo.training.update import Meter, _epoch_metrics


def test_metrics_are_means_over_samples_and_steps_or_the_largest_value():
    PartialState()
    steps = []
    for values in ([[1.0, 10.0], [4.0]], [[2.0, 3.0], [7.0]]):
        meter = Meter()
        for part in values:
            meter.add({"d_mean": torch.tensor(part), "d_max": torch.tensor(part)}, 1 / 3)
        steps.append({name: total.item() for name, total in meter.totals.items()})
    assert _epoch_metrics(steps) == pytest.approx({"d_mean": (5 + 4) / 2, "d_max": 10})


@pytest.mark.parametrize("mode", ["recompute", "auto", "rollout"])
def test_a_resumed_run_recomputes_old_values_if_it_is_told_to(tiny_flux_dir, tmp_path, mode):
    """``must_recompute`` False is what the run had decided before."""
    options = tiny_options(
        tiny_flux_dir, tmp_path, train__old_log_prob=mode, health__probe_images=0
    )
    run = build_run(options)
    rollouts, _ = sampled(run)
    recorded = [sample.noise_steps[0].log_prob.item() for sample in rollouts.samples]
    for number, sample in enumerate(rollouts.samples):
        wrong = dataclasses.replace(
            sample.noise_steps[0], log_prob=sample.noise_steps[0].log_prob + 1
        )
        rollouts.samples[number] = dataclasses.replace(sample, noise_steps=[wrong])
    run.state.must_recompute = False
    run.updater.recompute_old_log_probs(rollouts)
    prepared = [sample.noise_steps[0].log_prob.item() for sample in rollouts.samples]
    expected = np.array(recorded) + (0 if mode == "recompute" else 1)
    np.testing.assert_allclose(prepared, expected, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["nft", "guard_grpo"])
def test_an_image_that_is_not_finite_loses_only_its_score(
    tiny_flux_dir, tmp_path, monkeypatch, loss_type
):
    """Also where it is the dummy of a process that has fewer batches than another."""
    changes = {"train__loss_type": loss_type, "num_epochs": 1, "train__stop_on_collapse": True}
    options = tiny_options(
        tiny_flux_dir, tmp_path, **changes, train__max_missing_reward_fraction=0.2
    )
    run = build_run(options)
    original = sampling.rollout
    calls = []

    def rollout(*more):
        record = original(*more)
        calls.append(record)
        if len(calls) == 1:  # the first sample
            record.clean_latents[0] = record.noise_steps[0].next_latents[0] = torch.nan
        return record

    monkeypatch.setattr(sampling, "rollout", rollout)
    synced = run.state.strategy.synced_batches

    def with_dummy(batches, dummy, should_stop=None):
        yield from synced(batches, dummy, should_stop)
        yield dummy, True

    run.state.strategy.synced_batches = with_dummy
    Trainer(run).fit()
    (row,) = rows_of(options, "train")
    assert row["reward/missing_share"] == row["health/finite_share"] / 7 == 1 / 8
    assert row["train/grad_norm"] > 0 and row["health/latent_std"] > 0
