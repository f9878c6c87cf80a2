"""Whole runs on a pretended GPU end as on the CPU: every family, every objective."""

import dataclasses

import pytest
import torch
from tiny_policies import FAMILIES
from tiny_run import family_options, rows_of, train

from paco_grpo.objectives import OBJECTIVES

# What takes a branch of its own on a GPU: the outer autocast, offloading, recomputed activations,
# resume.
LIKE_ON_A_GPU = {
    "mixed_precision": "bf16",
    "speed__offload_vae": True,
    "enable_gradient_checkpointing": True,
    "save_freq": 1,
    "eval_freq": 1,
    "num_epochs": 2,
    "train__beta": 0.01,
}
SIGMAS = {"train__num_sigmas": 2, "train__sigma_one": True, "train__sigma_fraction": 1}
QUICK = {("flux", "ppo"), ("qwen_image_edit", "awm"), ("flux_kontext", "dgpo")}


def trained_twice(options):
    """An epoch, and another one after a resume."""
    train(dataclasses.replace(options, num_epochs=1))
    return train(dataclasses.replace(options, resume_from="latest")).run


def devices_of_decoding(policy):
    """An offloaded VAE that stays where it is would decode there, only slowly."""
    devices = set()
    decoder = policy.pipeline.vae.decoder
    hook = decoder.register_forward_pre_hook(lambda _, args: devices.add(args[0].device.type))
    side = policy.size_multiple
    policy.decode(policy.initial_latents([0], side, side), side, side)
    hook.remove()
    return devices


def cases():
    pairs = [(name, "ppo") for name in FAMILIES]
    pairs += [("flux", loss_type) for loss_type in OBJECTIVES if loss_type != "ppo"]
    pairs += sorted(QUICK - set(pairs))
    for pair in pairs:
        yield pytest.param(*pair, marks=pytest.mark.slow if pair in QUICK else pytest.mark.long)


@pytest.mark.parametrize(("name", "loss_type"), cases())
def test_a_run_ends_as_on_the_cpu(tiny_folder, tmp_path, on, name, loss_type):
    changes = LIKE_ON_A_GPU | {"train__loss_type": loss_type}
    if loss_type in ("awm", "dgpo"):
        changes |= SIGMAS
    weights = {}
    rows = {}
    for device in ("cpu", "cuda"):
        options = family_options(name, tiny_folder(name), tmp_path / device, **changes)
        with on(device):
            run = trained_twice(options)
            assert run.state.policy.device.type == device
            assert all(p.device.type == device for p in run.state.parameters.values())
            assert devices_of_decoding(run.state.policy) == {device}
            weights[device] = {n: p.detach().cpu() for n, p in run.state.parameters.items()}
        rows[device] = [numbers(row) for row in rows_of(options)]
    # The GPU's AdamW is the fused one, which rounds elsewhere.
    torch.testing.assert_close(weights["cuda"], weights["cpu"], rtol=1e-5, atol=1e-6)
    for on_gpu, on_cpu in zip(rows["cuda"], rows["cpu"], strict=True):
        assert on_gpu == pytest.approx(on_cpu, rel=1e-3, abs=1e-6, nan_ok=True)


def numbers(row):
    """A row of metrics.jsonl without times."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float) and not key.startswith(("time", "train_time"))
    }
