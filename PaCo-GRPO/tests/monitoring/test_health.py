"""Signs of collapse: limits on constructed statistics, statistics against NumPy, a run."""

import logging

import numpy as np
import pytest
import torch
from named import NAMES, load
from PIL import Image
from tiny_run import rows_of, tiny_options, train

from paco_grpo.evaluation.evaluate import evaluation_metrics
from paco_grpo.monitoring.health import against_first, judge_epoch, judge_evaluation
from paco_grpo.monitoring.observe import ReferenceProbe, SampleObserver
from paco_grpo.policies.lora import reference_weights
from paco_grpo.rewards.registry import short_name
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped

WELL = {
    "health/velocity_change": 0.05,
    "health/latent_std_vs_first": 0.9,
    "health/distinctness_vs_first": 0.8,
}


def test_limits_of_an_epoch():
    assert judge_epoch(WELL) == judge_epoch({}) == []
    for metric, bad, good in (
        ("health/velocity_change", 0.9, 0.7),
        ("health/diversity_vs_first", 0.65, 0.75),
        ("health/latent_std_vs_first", 0.4, 0.6),
        ("health/latent_std_vs_first", 2.5, 1.9),
        ("health/distinctness_vs_first", 0.1, 0.3),
    ):
        (finding,) = judge_epoch(WELL | {metric: bad})
        assert finding.sign == metric
        assert finding.collapse == (metric != "health/diversity_vs_first")
        assert judge_epoch(WELL | {metric: good}) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sign", ["velocity_change", "latent_std", "distinctness_vs_first"])
def test_a_sign_that_is_not_finite_is_a_collapse(sign, value):
    """It compares false with every limit."""
    (finding,) = judge_epoch(WELL | {f"health/{sign}": value})
    assert finding.collapse and finding.sign == f"health/{sign}"
    assert f"health/{sign} not finite" in finding.message


def evaluation(stderr, **means):
    row = {}
    for name, value in means.items():
        row |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": stderr}
    return row


def test_trained_rewards_against_evaluation_only_ones():
    first = evaluation(0.03, judge=0.4, oracle=0.0)
    hacked = evaluation(0.04, judge=0.8, oracle=-0.3)
    good = evaluation(0.04, judge=0.8, oracle=0.2)
    (finding,) = judge_evaluation([first, hacked], ["judge"])
    assert finding.sign == "eval/oracle_mean"
    assert "oracle" in finding.message
    assert "6.0" in finding.message
    assert judge_evaluation([first, good], ["judge"]) == []
    assert judge_evaluation([first, hacked], ["judge", "oracle"]) == []
    assert judge_evaluation([first], ["judge"]) == []


def test_every_recipe_s_guard_can_tell_of_an_exploited_reward():
    """Trained rewards rise and one that is only evaluated falls, by the names that a run logs."""
    rng = np.random.default_rng(0)
    guarded = set()
    for recipe in NAMES:
        options = load(recipe)
        trained = [short_name(name) for name, weight in options.train.reward_fn.items() if weight]
        names = [short_name(name) for name in options.test.reward_fn]
        for guard in set(names) - set(trained):
            guarded.add(recipe)
            rows = []
            for change in (0.0, 0.3):
                direction = np.where([name in trained for name in names], change, 0.0)
                direction[names.index(guard)] = -change
                scores = 0.5 + direction + rng.normal(0, 0.1, (64, len(names)))
                missing = np.zeros_like(scores, bool)
                rows.append(evaluation_metrics(scores, missing, names, [None] * 64))
            signs = [finding.sign for finding in judge_evaluation(rows, trained)]
            assert signs == ([f"eval/{guard}_mean"] if set(names) & set(trained) else []), recipe
    assert "toy_t2is_nft" in guarded


def test_statistics_of_samples_against_numpy():
    rng = np.random.default_rng(0)
    observer = SampleObserver()
    pixels = rng.integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    latents = torch.from_numpy(rng.standard_normal((5, 6, 3)).astype(np.float32))
    observer.add([Image.fromarray(image) for image in pixels[:3]], [0, 1, 3])
    observer.add([Image.fromarray(image) for image in pixels[3:]], [2, 4])
    items = np.array([5, 5, 2, 2, 7])  # the last one is alone
    metrics = observer.metrics(list(latents[:, None]), items)
    assert metrics["health/latent_std"] == pytest.approx(latents.numpy().std(axis=(1, 2)).mean())
    groups = pixels[[0, 1, 3, 2]].reshape(2, 2, -1) / 255
    variance = np.mean(groups.std(axis=1) ** 2)
    assert metrics["health/distinctness"] == pytest.approx(np.sqrt(variance))


def test_probe_measures_the_distance_to_the_base(tiny_flux_dir, tmp_path):
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, health__probe_images=2))
    assert run.probe.measure() == {"health/velocity_change": 0.0}  # a new LoRA changes nothing
    with torch.no_grad():
        for parameter in run.state.parameters.values():
            parameter.add_(0.05)
    measured = run.probe.measure()
    changes = []
    for velocity, x, sigma, base in run.probe._states:
        with reference_weights(run.state.policy):
            assert torch.equal(velocity(x, sigma), base)
        changes.append(float((velocity(x, sigma) - base).detach().norm() / base.norm()))
    assert measured["health/velocity_change"] == pytest.approx(np.mean(changes))
    of_resumed_run = ReferenceProbe(run.state.policy, run.test_items[:2], run.options)
    assert of_resumed_run.measure() == measured


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
    assert row["health/latent_std_vs_first"] == row["health/distinctness_vs_first"] == 1


def test_ratios_to_the_first_epochs():
    """Diversity 1 − b: means of the first and the last three epochs that have open prompts."""
    rows = []
    for epoch, between in enumerate((0.2, 0.3, 0.1, None, 0.5, 0.9, 0.4)):
        row = {"health/latent_std": 2.0 + epoch, "health/distinctness": 1.0 - epoch / 10}
        rows.append(row if between is None else row | {"reward/between": between})
    expected = {
        "health/latent_std_vs_first": 4.0,
        "health/distinctness_vs_first": 0.4,
        "health/diversity_vs_first": (0.5 + 0.1 + 0.6) / (0.8 + 0.7 + 0.9),
    }
    assert against_first(rows) == pytest.approx(expected)
    assert against_first(rows[:1])["health/diversity_vs_first"] == 1
    assert against_first([{"reward/between": 1.0}]) == {}
