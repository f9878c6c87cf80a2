"""What signs of collapse are seen in: statistics against NumPy, a run."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import rows_of, tiny_options, train

from paco_grpo.monitoring.health import ReferenceProbe, SampleObserver
from paco_grpo.monitoring.log import logged_warnings
from paco_grpo.monitoring.signs import judge_epoch
from paco_grpo.policies.lora import reference_weights
from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped


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
    kept = (tmp_path / "runs" / "run" / "log.txt").read_text()
    for text in (caplog.text, kept):
        assert "health/velocity_change" in text and "stop_on_collapse" in text
    others = [warned.message for warned in logged_warnings(tmp_path / "runs" / "run")]
    assert "stop_on_collapse" in others[-1] and "velocity_change" not in "".join(others)
    assert (tmp_path / "runs" / "run" / "checkpoints" / "epoch_0001" / "state").is_dir()
    row = rows_of(config, "train")[0]
    assert row["health/velocity_change"] > 0.75
    assert row["health/latent_std_vs_first"] == 1
