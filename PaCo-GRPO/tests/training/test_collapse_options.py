"""Options against collapse in a tiny run: features reach the advantages on one and on two batches,
w − b is in metrics.jsonl.
"""

import numpy as np
import pytest
import torch
from fakes import fake_judge
from tiny_pipelines import save_clip
from tiny_run import rows_of, tiny_options, train, write_prompts

from paco_grpo.advantages import compute_advantages
from paco_grpo.advantages import features as features_module
from paco_grpo.options import ConfigError
from paco_grpo.options.schema import TrainOptions
from paco_grpo.rewards.clip import ClipScore
from paco_grpo.training import trainer as trainer_module
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer


@pytest.mark.parametrize("kind", ["latents", "clip"])
def test_features_of_the_images_reach_the_advantages(kind, tiny_flux_dir, tmp_path, monkeypatch):
    clip = save_clip(tmp_path / "clip")
    options = tiny_options(
        tiny_flux_dir,
        tmp_path,
        num_epochs=1,
        train__diversity_features=clip if kind == "clip" else kind,
        **{"train__perceptual_entropy": 0.5}
        if kind == "clip"
        else {"train__neighbor_factor": True},
    )
    run = build_run(options)
    seen = []
    images = []
    monkeypatch.setattr(
        trainer_module,
        "compute_advantages",
        lambda *arguments: seen.append(arguments) or compute_advantages(*arguments),
    )
    decode = run.state.policy.decode

    def remember(latents, *size):
        images.extend(zip(latents, made := decode(latents, *size), strict=True))
        return made

    run.state.policy.decode = remember
    Trainer(run).epoch()
    latents, pictures = zip(*images, strict=True)
    expected = (
        torch.stack(latents).flatten(1)
        if kind == "latents"
        else ClipScore(clip).images(pictures, 8)
    )
    *_, passed_options, features = seen[0]
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert passed_options.train == options.train


def test_features_of_two_processes_are_in_global_order(monkeypatch):
    other = {0: np.array([1.0]), 1: np.array([3.0])}
    monkeypatch.setattr(features_module, "gather_object", lambda mine: [*mine, other])
    features = features_module.GroupFeatures(
        TrainOptions(diversity_features="latents"), torch.device("cpu")
    )
    found = features.gathered([torch.zeros(1, 1, 2), torch.full((1, 1, 2), 2.0)], total=4)
    assert found.tolist() == [[0, 0], [1, 0], [2, 2], [3, 0]]


def test_w_minus_b_of_an_epoch_and_prompts_that_must_be_open(tiny_flux_dir, tmp_path):
    with fake_judge.FakeJudge() as judge:
        rewards = {"consistency_score": 1.0, "between_images": 8.0}
        options = tiny_options(
            tiny_flux_dir,
            tmp_path,
            num_epochs=1,
            train__reward_fn=rewards,
            train__reward_fn_kwargs={name: {"base_url": judge.url} for name in rewards},
        )
        with pytest.raises(ConfigError, match="between_images.*open"):
            build_run(options)
        write_prompts(tmp_path / "prompts", first_open=4)
        train(options)
        (row,) = rows_of(options, "train")
    within = row["reward/consistency_score_mean"]
    between = 1 - row["reward/between_images_mean"]
    assert (row["reward/within"], row["reward/between"]) == pytest.approx((within, between))
    assert row["reward/within_minus_between"] == pytest.approx(within - between)
