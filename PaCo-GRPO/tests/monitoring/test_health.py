"""Signs of collapse: every limit on constructed statistics, the statistics against NumPy, and a run that collapses."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import rows_of, tiny_options, train

from paco_grpo.monitoring.health import judge_epoch, judge_evaluation
from paco_grpo.monitoring.observe import BaseProbe, distinctness, image_statistics
from paco_grpo.policies.lora import reference
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import TrainingStopped

WELL = {
    "train/grad_norm": 0.1, "train/clip_share": 0.2, "advantage/zero_std_share": 0.0, "health/velocity_change": 0.05,
    "health/pixel_std_vs_first": 1.1, "health/latent_std_vs_first": 0.9,
    "health/pixel_detail_vs_first": 1.2, "health/pixel_mean_vs_first": 0.02, "health/distinctness_vs_first": 0.8,
}  # fmt: skip

# A value beyond each limit, one within it, and whether the first stops a run.
BROKEN = {
    "health/velocity_change": (0.9, 0.7, True),
    "health/pixel_std_vs_first": (2.5, 1.9, True),
    "health/latent_std_vs_first": (0.4, 0.6, True),
    "health/pixel_detail_vs_first": (0.2, 0.4, True),
    "health/pixel_mean_vs_first": (-0.4, -0.2, True),
    "health/distinctness_vs_first": (0.1, 0.3, True),
    "train/grad_norm": (3.0, 1.9, False),
    "train/clip_share": (0.49, 0.47, False),
    "advantage/zero_std_share": (0.9, 0.7, False),
}


def test_limits_of_an_epoch():
    assert judge_epoch([WELL] * 10, 2) == []
    assert judge_epoch([{}], 2) == []  # nft has no ratio, the first epoch nothing before it
    assert judge_epoch([WELL] * 4 + [WELL | {"train/grad_norm": 99.0}], 2) == []  # too few to compare with
    assert judge_epoch([WELL | {"train/clip_share": 0.49}], 1) == []  # a single step clips nothing
    for metric, (bad, good, stops) in BROKEN.items():
        (finding,) = judge_epoch([WELL] * 9 + [WELL | {metric: bad}], 2)
        assert (finding.sign, finding.collapse) == (metric, stops)
        assert judge_epoch([WELL] * 9 + [WELL | {metric: good}], 2) == []


def evaluation(**means):
    row = {}
    for name, value in means.items():
        row |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": 0.03}
    return row


def test_trained_rewards_against_evaluation_only_ones():
    first = evaluation(judge=0.4, oracle=0.0)
    hacked, good = evaluation(judge=0.8, oracle=-0.3), evaluation(judge=0.8, oracle=0.2)
    (finding,) = judge_evaluation([first, hacked], ["judge"])
    assert finding.sign == "eval/oracle_mean" and "oracle" in finding.message and "7.1" in finding.message
    assert judge_evaluation([first, good], ["judge"]) == []
    assert judge_evaluation([first, hacked], ["judge", "oracle"]) == []
    assert judge_evaluation([first], ["judge"]) == []


def test_image_statistics_against_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
    mean, contrast, detail = image_statistics(Image.fromarray(np.repeat(pixels[..., None], 3, axis=2)))
    grey = pixels / 255
    steps = [abs(grey[y, x] - grey[y - 1, x]) for y in range(1, 6) for x in range(8)]
    steps += [abs(grey[y, x] - grey[y, x - 1]) for y in range(6) for x in range(1, 8)]
    assert (mean, contrast) == (pytest.approx(grey.mean()), pytest.approx(grey.std()))
    assert detail == pytest.approx(np.mean(steps) / grey.std())
    assert image_statistics(Image.new("RGB", (4, 4), "black"))[1:] == (0.0, 0.0)  # no division by zero


def test_distinctness_is_the_spread_within_groups():
    rng = np.random.default_rng(0)
    thumbnails, items = rng.random((7, 5)), np.array([3, 0, 3, 0, 3, 0, 9])
    expected = np.sqrt(np.mean([thumbnails[items == i].std(axis=0) ** 2 for i in (0, 3)]))
    assert distinctness(thumbnails, items) == pytest.approx(expected)
    assert distinctness(np.repeat(thumbnails[:1], 7, axis=0), items) == pytest.approx(0, abs=1e-12)
    assert np.isnan(distinctness(thumbnails[:1], items[:1]))


def test_probe_measures_the_distance_to_the_base(tiny_flux_dir, tmp_path):
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, health__probe_images=2))
    assert run.probe.measure() == {"health/velocity_change": 0.0}  # a new LoRA changes nothing
    with torch.no_grad():
        for parameter in run.state.parameters.values():
            parameter.add_(0.05)
    measured = run.probe.measure()
    policy, alone = run.state.policy, BaseProbe(run.state.policy, run.test_items[1:2], run.options)
    velocity, x, sigma, base = run.probe._states[1]
    with reference(policy):
        assert torch.equal(velocity(x, sigma), base)
    alone._states = [run.probe._states[1]]
    expected = float((velocity(x, sigma) - base).detach().norm() / base.norm())
    assert alone.measure()["health/velocity_change"] == pytest.approx(expected)
    assert BaseProbe(policy, run.test_items[:2], run.options).measure() == measured  # as a resumed run makes it


def test_far_too_high_learning_rate_stops_the_run(tiny_flux_dir, tmp_path, caplog):
    changes = {"train__learning_rate": 3.0, "num_epochs": 4, "save_freq": 0}
    with caplog.at_level(logging.WARNING):
        config = tiny_options(tiny_flux_dir, tmp_path, train__stop_on_collapse=True, **changes)
        with pytest.raises(TrainingStopped, match="stop_on_collapse: after epoch 1.*learning_rate"):
            train(config)
    assert "health/velocity_change" in caplog.text
    assert (tmp_path / "runs" / "run" / "checkpoints" / "epoch_0001" / "state").is_dir()
    row = rows_of(config, "train")[0]
    assert row["health/velocity_change"] > 0.75
    assert row["health/pixel_std_vs_first"] == 1 and row["health/pixel_mean_vs_first"] == 0


def test_consistency_that_rises_while_images_become_the_same():
    """w rises and κ falls: the generator collapses to one answer; both rising, or both falling, is no sign of it."""

    def signs(within, kappa):
        rows = [{"reward/within": w, "reward/kappa": k} for w, k in zip(np.linspace(*within, 12), np.linspace(*kappa, 12))]
        return [finding.sign for finding in judge_epoch(rows, 1)]

    assert signs((0.5, 0.9), (0.3, 0.0)) == ["reward/kappa"]
    assert signs((0.5, 0.9), (0.3, 0.6)) == signs((0.9, 0.5), (0.3, 0.0)) == []
    assert [f.sign for f in judge_epoch([{"reward/within": 0.9, "reward/kappa": -1.0}] * 9, 1)] == []
