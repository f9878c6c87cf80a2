"""Objectives with sampled σ, snapshots and coupled groups in whole runs: gradients, resumed, and on
two processes.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_policies import disturb, load
from tiny_run import rows_of, sampled, tiny_options, train
from toy_policy import joint_dgpo

from paco_grpo.options import ConfigError
from paco_grpo.policies.adapters import add_lora, save_diffusers
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


def save_teacher(flux, folder, seed):
    """An adapter with other layers and another rank than a run's."""
    policy = load("flux", flux)
    add_lora(policy, rank=3, alpha=6, targets="ff.net.2")
    disturb(policy, seed=seed, scale=0.3)
    save_diffusers(policy, folder)
    return str(folder)


def test_a_teacher_in_a_whole_run(tiny_flux_dir, tmp_path, caplog):
    """The student nears it; it is not saved, but loaded again where the run resumes; another one is
    refused.
    """
    caplog.set_level("INFO")
    teacher = tmp_path / "teacher"
    save_teacher(tiny_flux_dir, teacher, 1)
    changes = {"train__loss_type": "opd", "train__opd_teachers": f"{{only: {teacher}}}"}
    changes |= {"train__lora_targets": "ff.net.2,ff.net.0.proj", "train__learning_rate": "3e-3"}
    options = tiny_options(tiny_flux_dir, tmp_path, health__probe_images=0, **changes)
    options = dataclasses.replace(options, num_epochs=3)
    whole = train(dataclasses.replace(options, run_name="whole")).run
    distances = [row["train/teacher_kl"] for row in rows_of(whole.options, "train")]
    assert 0 < distances[2] < distances[1] < distances[0]
    assert "plain diffusers" in caplog.text and "DOES NOT HOLD" not in caplog.text
    train(dataclasses.replace(options, num_epochs=2))
    resumed = train(dataclasses.replace(options, resume_from="latest")).run
    for name, tensor in whole.state.parameters.items():
        assert torch.equal(tensor, resumed.state.parameters[name])
    folder = resumed.folder / "checkpoints" / "epoch_0003"
    assert {path.name for path in (folder / "state").glob("*.safetensors")} == {
        "trainable.safetensors",
        "ema.safetensors",
    }
    assert all("ff.net" in key for key in load_file(folder / "adapter/adapter_model.safetensors"))
    assert str(teacher) in (folder / "diffusers" / "README.md").read_text()
    save_teacher(tiny_flux_dir, teacher, 2)
    with pytest.raises(ConfigError, match="trained with other values of the adapter teacher_only"):
        train(dataclasses.replace(options, num_epochs=4, resume_from="latest"))


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
