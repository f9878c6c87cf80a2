"""Signs of collapse: limits on constructed statistics, statistics against NumPy, a run."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import rows_of, tiny_options, train

from paco_grpo.monitoring.health import (
    ReferenceProbe,
    SampleObserver,
    against_first,
    judge_epoch,
    judge_evaluation,
    judge_scores,
)
from paco_grpo.policies.lora import reference_weights
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped

WELL = {
    "health/velocity_change": 0.05,
    "health/latent_std_vs_first": 0.9,
    "health/distinctness_vs_first": 0.8,
}


@pytest.mark.parametrize(
    ("sign", "bad", "good", "is_collapse"),
    [
        ("velocity_change", 0.9, 0.7, True),
        ("diversity_vs_first", 0.65, 0.75, False),
        ("latent_std_vs_first", 0.4, 0.6, True),
        ("latent_std_vs_first", 2.5, 1.9, True),
        ("distinctness_vs_first", 0.1, 0.3, True),
        # They compare false with every limit.
        ("latent_std", float("inf"), 0.6, True),
    ],
)
def test_limits_of_an_epoch(sign, bad, good, is_collapse):
    (finding,) = judge_epoch(WELL | {f"health/{sign}": bad})
    assert (finding.sign, finding.collapse) == (f"health/{sign}", is_collapse)
    assert judge_epoch(WELL | {f"health/{sign}": good}) == []


def evaluation(stderr, **means):
    row = {}
    for name, value in means.items():
        row |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": stderr}
    return row


def test_trained_rewards_against_evaluation_only_ones():
    first = evaluation(0.03, judge=0.4, oracle=0.0)
    hacked = evaluation(0.04, judge=0.8, oracle=-0.3)
    good = evaluation(0.04, judge=0.8, oracle=0.2)
    half_way = evaluation(0.05, judge=0.6, oracle=-0.15)  # nor does the last step say enough
    assert judge_evaluation([half_way, hacked], ["judge"]) == []
    for rows in ([first, hacked], [first, half_way, hacked]):
        (finding,) = judge_evaluation(rows, ["judge"])
        assert finding.sign == "eval/oracle_mean"
        assert "6.0" in finding.message  # standard errors of both evaluations
    assert judge_evaluation([first, good], ["judge"]) == []
    assert judge_evaluation([first, hacked], ["judge", "oracle"]) == []
    assert judge_evaluation([first], ["judge"]) == []


def test_statistics_of_samples_against_numpy():
    rng = np.random.default_rng(0)
    observer = SampleObserver()
    pixels = rng.integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    latents = torch.from_numpy(rng.standard_normal((5, 6, 3)).astype(np.float32))
    images = list(map(Image.fromarray, pixels))
    observer.add(images[:3], [0, 1, 3])
    observer.add(images[3:], [2, 4])
    # The last one is alone.
    metrics = observer.metrics(list(latents[:, None]), np.array([5, 5, 2, 2, 7]))
    assert metrics["health/latent_std"] == pytest.approx(latents.numpy().std(axis=(1, 2)).mean())
    thumbnails = pixels.reshape(5, 16, 2, 16, 3, 3).mean(axis=(2, 4)).round()
    groups = thumbnails[[0, 1, 3, 2]].reshape(2, 2, -1) / 255
    spread = np.sqrt(np.mean(groups.std(axis=1) ** 2))
    assert metrics["health/distinctness"] == pytest.approx(spread, rel=0.01)
    assert metrics["health/finite_share"] == 1
    # One that is not finite is left out.
    observer.add([None], [4])
    finite = observer.metrics(list(latents[:, None]), np.array([5, 5, 2, 2, 2]))
    spreads = latents[:4].numpy().std(axis=(1, 2))
    expected = metrics | {"health/finite_share": 0.8, "health/latent_std": spreads.mean()}
    assert finite == pytest.approx(expected)
    for number in range(4):
        observer.add([None], [number])
    (finding,) = judge_epoch(observer.metrics(list(latents[:, None]), np.array([5, 5, 2, 2, 2])))
    assert finding.sign == "health/latent_std"


def test_probe_measures_the_distance_to_the_base(tiny_flux_dir, tmp_path):
    """Of two images, which the base takes to the first noise step."""
    steps = {"sample__num_steps": 5, "sample__noise_steps": "2,3"}
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, health__probe_images=2, **steps))
    policy = run.state.policy
    times = []

    def record(module, args, inputs):
        times.append(inputs["timestep"].item())

    hook = policy.transformer.register_forward_pre_hook(record, with_kwargs=True)
    assert run.probe.measure() == {"health/velocity_change": 0.0}  # a new LoRA changes nothing
    hook.remove()
    first, second, noisy = policy.sigmas(5, 16, 16)[:3].tolist()
    assert times == pytest.approx([first, second, noisy] * 2 + [noisy] * 2)
    with torch.no_grad():
        for parameter in run.state.parameters.values():
            parameter.add_(0.05)
    changes = []
    for velocity, x, sigma, base in run.probe._states:
        with reference_weights(policy):
            assert torch.equal(velocity(x, sigma), base)
        changes.append(float((velocity(x, sigma) - base).detach().norm() / base.norm()))
    measured = run.probe.measure()
    assert measured["health/velocity_change"] == pytest.approx(np.mean(changes))
    of_resumed_run = ReferenceProbe(policy, run.test_items[:2], run.options)
    assert of_resumed_run.measure() == measured


def test_far_too_high_learning_rate_stops_the_run(tiny_flux_dir, tmp_path, caplog):
    changes = {"train__learning_rate": 3.0, "num_epochs": 4, "save_freq": 0}
    with caplog.at_level(logging.WARNING):
        config = tiny_options(tiny_flux_dir, tmp_path, train__stop_on_collapse=True, **changes)
        with pytest.raises(TrainingStopped, match="stop_on_collapse"):
            train(config)
    assert "health/velocity_change" in caplog.text
    assert (tmp_path / "runs" / "run" / "checkpoints" / "epoch_0001" / "state").is_dir()
    row = rows_of(config, "train")[0]
    assert row["health/velocity_change"] > 0.75
    assert row["health/latent_std_vs_first"] == row["health/distinctness_vs_first"] == 1


def test_diversity_is_of_the_epochs_that_have_open_prompts():
    """The ratios of a run: test_whole_run.py."""
    rows = [{"reward/between": 0.2}, {}, {"reward/between": 0.6}]
    assert against_first(rows) == {"health/diversity_vs_first": 1}
    assert against_first([{"reward/between": 1.0}]) == {}


def test_equal_scores_are_named_once():
    flat = {"advantage/mean_abs": 0.0, "advantage/dropped_share": 0.5, "reward/ocr_mean": 0.0}
    good = flat | {"advantage/mean_abs": 0.7}
    missing = flat | {"advantage/dropped_share": 1.0}
    (finding,) = judge_scores([good, missing, flat])
    assert "ocr 0.0000" in finding.message and not finding.collapse
    for rows in ([flat, flat], [flat, good], [missing], [{}]):
        assert judge_scores(rows) == []
