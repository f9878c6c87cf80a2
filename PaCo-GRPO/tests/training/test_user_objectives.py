"""Objectives from a user's file: custom steps, a first pass over whole groups, snapshots."""

import dataclasses

import numpy as np
import pytest
import torch
from forked_runs import COMPARABLE, rows, run_to_end, state
from tiny_run import rows_of, tiny_options, train
from user_objectives import joint_loss, matching_error

from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.training.build import build_run
from paco_grpo.training.sample import sample_epoch
from paco_grpo.training.update import Pass

COUPLED = {"train__loss_type": "user_objectives:coupled", "sample__noise_level": 0}


def test_a_plain_function_trains(tiny_flux_dir, tmp_path):
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, train__loss_type="user_objectives:reinforce")
    run = train(options).run
    assert run.plan.gradient_steps == 1 and "train/log_prob_mean" in rows_of(options, "train")[0]
    assert any(p.abs().sum() > 0 for name, p in run.state.parameters.items() if "lora_B" in name)


def test_two_passes_give_the_gradient_of_the_joint_loss(tiny_flux_dir, tmp_path):
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, health__probe_images=0, train__max_grad_norm=1e9, **COUPLED))
    samples, policy, strategy = run.state.sampler.samples(0), run.state.policy, run.state.strategy
    with torch.no_grad():
        for parameter in run.state.parameters.values():
            parameter.add_(0.05)
    rollouts = sample_epoch(
        policy, run.train_items, samples, ScoreQueue({}), run.options, strategy, batch_size=4, epoch=0
    )
    advantages = np.linspace(-1, 1, len(samples.item_ids))
    found = {}
    run.state.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in run.state.parameters.items()})
    run.updater.run(rollouts, advantages, np.ones(len(advantages), bool), epoch=0)
    run.state.optimizer.zero_grad(set_to_none=True)

    everything = np.arange(len(advantages))
    steps = run.updater._steps(Pass(rollouts, advantages, epoch=0), everything)
    assert all(isinstance(step.index, float) for step in steps) and len(steps) == 2
    losses = [
        joint_loss(matching_error(step, policy), samples.item_ids, torch.from_numpy(advantages)) for step in steps
    ]
    (sum(losses) / 2).backward()
    scale = max(float(p.grad.abs().max()) for p in run.state.parameters.values())
    assert scale > 0
    for name, parameter in run.state.parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4 * scale)


def test_groups_are_not_split_across_optimizer_steps(tiny_flux_dir, tmp_path):
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **COUPLED))
    run.updater.gradient_steps = 2
    item_ids = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    for inner in (0, 1):
        chunks = run.updater._chunks(item_ids, epoch=3, inner=inner)
        assert sorted(np.concatenate(chunks)) == list(range(8))
        assert not set(item_ids[chunks[0]]) & set(item_ids[chunks[1]])
    run.updater.objective = dataclasses.replace(run.updater.objective, group_weights=None)
    assert [len(chunk) for chunk in run.updater._chunks(item_ids, 3, 0)] == [4, 4]


def test_a_snapshot_is_updated_and_saved(tiny_flux_dir, tmp_path):
    options = tiny_options(tiny_flux_dir, tmp_path, num_epochs=1, **COUPLED)
    first = train(options).run
    slow = first.state.snapshots["slow"]
    for name, parameter in first.state.parameters.items():
        copy = slow[name.replace(".default.", ".slow.")]
        if "lora_B" in name:  # starts at 0: half-way after one blend
            torch.testing.assert_close(copy, parameter.detach() / 2, rtol=1e-5, atol=1e-8)
    resumed = train(dataclasses.replace(options, num_epochs=2, resume_from="latest")).run
    whole = train(dataclasses.replace(options, num_epochs=2, run_name="whole")).run
    for name, parameter in whole.state.snapshots["slow"].items():
        assert torch.equal(resumed.state.snapshots["slow"][name], parameter)


@pytest.mark.slow
def test_two_processes_agree_on_group_weights(tiny_flux_dir, tmp_path):
    changes = {"num_epochs": 1, "sample__num_images_per_prompt": 4, **COUPLED}
    for name, processes in (("one", 1), ("two", 2)):
        run_to_end(tiny_flux_dir, tmp_path / name, processes, **COMPARABLE | changes)
    one, two = (rows(tmp_path / name)[0] for name in ("one", "two"))
    for key in ("train/loss", "train/grad_norm", "train/matching_error"):
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-7)
    assert state(tmp_path / "one", 1).keys() <= state(tmp_path / "two", 1).keys()
