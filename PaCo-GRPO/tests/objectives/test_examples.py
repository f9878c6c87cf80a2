"""examples/tempflow.py: a method as a user writes it, outside of the package."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import rows_of, tiny_options, train
from toy_policy import ToyPolicy, numpy_step, sample

from paco_grpo.objectives import Step, create_objective
from paco_grpo.options import RunOptions, TrainOptions
from paco_grpo.options.schema import SampleOptions

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("index", [0, 2])
def test_a_step_counts_by_its_noise(index):
    policy = ToyPolicy(dtype=torch.float64)
    result = sample(policy)
    train_options = TrainOptions(loss_type="tempflow:TempFlow", clip_range=0.05)
    options = RunOptions(train=train_options, sample=SampleOptions(noise_steps=(0, 1, 2)))
    step = Step(result, index, torch.tensor([1.5, -0.5, 5.0]))
    plain = create_objective(RunOptions(train=TrainOptions(clip_range=0.05))).loss(step, policy)
    sigmas = result.sigmas.tolist()
    deviations = []
    for i in (0, 1, 2):
        deviations.append(numpy_step(0, 0, sigmas[i], sigmas[i + 1], sigmas[1], 0.8)[2])
    weight = deviations[index] / np.mean(deviations)
    weighted = create_objective(options).loss(step, policy)
    torch.testing.assert_close(weighted.loss, weight * plain.loss)
    assert weighted.metrics["step_weight"].tolist() == pytest.approx(3 * [weight])


def test_it_trains(tiny_flux_dir, tmp_path):
    changes = {"train__loss_type": "tempflow:TempFlow", "sample__num_noise_steps": 1}
    changes |= {"sample__noise_steps": "0,1", "sample__same_latent": True}
    options = tiny_options(tiny_flux_dir, tmp_path, health__probe_images=0, **changes)
    train(options)
    weights = [row["train/step_weight"] for row in rows_of(options, "train")]
    assert all(0 < weight < 2 and weight != 1 for weight in weights)
