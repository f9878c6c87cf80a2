"""Objectives with sampled σ, snapshots and coupled groups in whole runs: resumed, and on two processes."""

import dataclasses

import pytest
import torch
from forked_runs import COMPARABLE, TOLERANCE, rows, run_to_end, weights
from tiny_run import rows_of, tiny_options, train

SIGMAS = {"sample__num_steps": 5, "sample__noise_level": 0, "train__num_sigmas": 2, "train__sigma_fraction": 0.8}
RUNS = {
    "nft": SIGMAS | {"train__sigma_one": True},
    "awm": SIGMAS | {
        "train__num_inner_epochs": 2, "train__awm_clip_range": 0.1,
        "train__awm_slow_beta": 0.5,
    },
    "dgpo": SIGMAS | {
        "train__gradient_step_per_epoch": 2, "train__dgpo_reference": "slow", "train__dgpo_beta": 50.0,
        "train__dgpo_clip_range": 1e-4,
    },
    "flow_dppo": {"train__num_inner_epochs": 2, "train__dppo_divergence": 1e-7},
}  # fmt: skip
SNAPSHOTS = {"nft": {"old"}, "awm": {"old", "slow"}, "dgpo": {"slow"}, "flow_dppo": set()}
METRICS = {
    "nft": {"old_distance"}, "awm": {"slow_distance", "clip_share"}, "dgpo": {"masked_share"},
    "flow_dppo": {"divergence_max", "divergence_mean", "masked_positive"},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_has_the_same_bits(tiny_flux_dir, tmp_path, name):
    options = tiny_options(tiny_flux_dir, tmp_path, train__loss_type=name, health__probe_images=0, **RUNS[name])
    train(dataclasses.replace(options, num_epochs=1))
    resumed = train(dataclasses.replace(options, resume_from="latest")).run
    whole = train(dataclasses.replace(options, run_name="whole")).run
    assert set(whole.state.snapshots) == SNAPSHOTS[name]
    for part in ("parameters", *SNAPSHOTS[name]):
        one, two = (r.state.parameters if part == "parameters" else r.state.snapshots[part] for r in (whole, resumed))
        assert any(p.any() for n, p in one.items() if "lora_B" in n)
        assert all(torch.equal(p, two[n]) for n, p in one.items())
    row = rows_of(options, "train")[1]
    assert {f"train/{metric}" for metric in METRICS[name]} <= row.keys()
    if name == "flow_dppo":  # the second pass over an epoch
        assert row["train/divergence_max"] > row["train/divergence_mean"] > 0 and row["train/masked_positive"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(tiny_flux_dir, tmp_path, name):
    changes = {"train__loss_type": name, **COMPARABLE, **RUNS[name]}
    for folder, processes in (("one", 1), ("two", 2)):
        run_to_end(tiny_flux_dir, tmp_path / folder, processes, **changes)
    one, two = ([row for row in rows(tmp_path / folder) if "train/loss" in row] for folder in ("one", "two"))
    for before, after in zip(one, two, strict=True):
        for key in ("train/loss", "train/grad_norm", *(f"train/{metric}" for metric in METRICS[name])):
            assert after[key] == pytest.approx(before[key], rel=1e-3, abs=1e-6), key
    for part in ("trainable", *SNAPSHOTS[name]):
        before, after = (weights(tmp_path / folder, part) for folder in ("one", "two"))
        for key, tensor in before.items():
            torch.testing.assert_close(after[key], tensor, rtol=0, atol=TOLERANCE)


