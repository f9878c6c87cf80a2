"""Objectives with sampled σ, snapshots and coupled groups in whole runs: gradients, resumed, and on
two processes.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tiny_run import sampled, tiny_options, train
from toy_policy import joint_dgpo

from paco_grpo.training.build import build_run

SIGMAS = {
    "sample__num_steps": 5,
    "sample__noise_level": 0,
    "train__num_sigmas": 2,
    "train__sigma_fraction": 0.8,
}
AWM = SIGMAS | {
    "train__loss_type": "awm",
    "train__num_inner_epochs": 2,
    "train__awm_clip_range": 0.1,
    "train__awm_slow_beta": 0.5,
}


def test_a_resumed_run_has_the_same_bits(tiny_flux_dir, tmp_path):
    """With two snapshots, an average, random σ and noise in each pass, and a random reward."""
    reward = {"train__reward_fn": '{"reward_factories:drawn": 1.0}'}
    options = tiny_options(tiny_flux_dir, tmp_path, health__probe_images=0, **AWM, **reward)
    train(dataclasses.replace(options, num_epochs=1))
    resumed = train(dataclasses.replace(options, resume_from="latest")).run.state
    whole = train(dataclasses.replace(options, run_name="whole")).run.state
    assert whole.weights().keys() == {"trainable", "ema", "old", "slow"}
    for part, tensors in whole.weights().items():
        assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name), part
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.weights()[part][name]), (part, name)


@pytest.fixture
def dgpo_run(tiny_flux_dir, tmp_path):
    changes = {
        "train__loss_type": "dgpo",
        "train__dgpo_clip_range": "None",
        "train__num_inner_epochs": 2,
        "train__max_grad_norm": 1e9,
    }
    return build_run(
        tiny_options(tiny_flux_dir, tmp_path, health__probe_images=0, **SIGMAS | changes)
    )


def test_two_passes_give_the_gradient_of_the_joint_loss(dgpo_run):
    """In the second inner epoch, whose order is another one."""
    run = dgpo_run
    objective = run.updater.objective
    objective.steps = lambda rollout, rng: [1, 3]
    with torch.no_grad():
        for parameter in run.state.parameters.values():
            parameter.add_(0.05)
    rollouts = sampled(run)[0]
    advantages = np.linspace(-1, 1, 8)
    found = {}
    run.state.optimizer.step = lambda: found.update(
        {n: p.grad.clone() for n, p in run.state.parameters.items()}
    )
    run.updater.update(rollouts, advantages, np.ones(8, bool), epoch=0)
    run.state.optimizer.zero_grad(set_to_none=True)
    micro_batches = run.updater._micro_batches(rollouts, advantages, np.arange(8), 0, 1)
    assert len(micro_batches) > 1
    whole = dataclasses.replace(
        micro_batches[0],
        samples=rollouts.samples,
        positions=np.arange(8),
        advantages=advantages,
        weight=1.0,
        group={},
        frozen=(),
    )
    steps = whole.build_steps()
    (sum(joint_dgpo(step, run.state.policy, run.options.train) for step in steps) / 16).backward()
    scale = max(float(p.grad.abs().max()) for p in run.state.parameters.values())
    assert scale > 0
    for name, parameter in run.state.parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4 * scale)


def test_optimizer_steps_keep_groups_together_and_inner_epochs_draw_anew(dgpo_run):
    updater = dgpo_run.updater
    item_ids = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    everything = np.ones(8, bool)
    updater.gradient_steps = 2
    for whole_groups in (True, False):
        updater.objective.whole_groups = whole_groups
        for inner in (0, 1):
            first, second = updater._chunks(item_ids, everything, epoch=3, inner_epoch=inner)
            assert sorted([*first, *second]) == list(range(8))
            is_split = bool(set(item_ids[first]) & set(item_ids[second]))
            assert is_split != whole_groups
    orders = set()
    for epoch, inner in ((3, 0), (3, 1), (3, 2), (4, 0), (4, 1)):
        orders.add(tuple(np.concatenate(updater._chunks(item_ids, everything, epoch, inner))))
    assert len(orders) == 4  # each first pass takes the sampler's
    rollouts = sampled(dgpo_run)[0]
    passes = {}
    for epoch, inner in itertools.product(range(12), repeat=2):
        (micro_batch,) = updater._micro_batches(rollouts, np.zeros(8), np.arange(2), epoch, inner)
        assert micro_batch.inner_epoch == inner
        passes[epoch, inner] = micro_batch
    assert len({micro_batch.epoch_seed for micro_batch in passes.values()}) == 144
    of_epoch = {tuple(passes[0, other].indices) for other in range(12)}
    of_pass = {tuple(passes[other, 0].indices) for other in range(12)}
    assert len(of_epoch) > 1 and len(of_pass) > 1
