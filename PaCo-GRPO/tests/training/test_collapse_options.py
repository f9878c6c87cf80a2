"""Options against collapse in a tiny run: features reach the advantages on one and on two batches, κ is in metrics.jsonl."""

import dataclasses
import json

import numpy as np
import pytest
from fakes import fake_judge
from tiny_pipelines import save_clip
from tiny_run import rows_of, tiny_options, train

from paco_grpo.advantages import compute_advantages
from paco_grpo.options import ConfigError
from paco_grpo.rewards.clip import clipscore
from paco_grpo.training import trainer as trainer_module
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer


@pytest.fixture
def seen(monkeypatch):
    """Arguments and images of each call of ``compute_advantages``."""
    calls = []

    def spy(rewards, *given, **options):
        calls.append((rewards, options))
        return compute_advantages(rewards, *given, **options)

    monkeypatch.setattr(trainer_module, "compute_advantages", spy)
    return calls


@pytest.mark.parametrize("kind", ["latents", "clip"])
def test_features_of_the_images_reach_the_advantages(kind, tiny_flux_dir, tmp_path, seen, monkeypatch):
    clip = save_clip(tmp_path / "clip")
    options = tiny_options(
        tiny_flux_dir, tmp_path, num_epochs=1, train__neighbor_factor=True, train__perceptual_entropy=0.5,
        train__diversity_features=clip if kind == "clip" else kind,
    )  # fmt: skip
    trainer = Trainer(build_run(options))
    kept = {}
    add = trainer.run.features.add

    def remember(images, numbers):
        kept.update(zip(numbers, images, strict=True))
        add(images, numbers)

    monkeypatch.setattr(trainer.run.features, "add", remember)
    sample, rollouts = trainer._sample, []
    monkeypatch.setattr(trainer, "_sample", lambda *given: rollouts.append(sample(*given)) or rollouts[-1])
    trainer.fit()
    ((_, given),) = seen
    if kind == "clip":
        expected = clipscore(clip).image_features([kept[number] for number in range(len(kept))]).numpy()
    else:
        expected = np.concatenate([one.clean_latents.flatten(1).numpy() for one in rollouts[0].samples])
    np.testing.assert_allclose(given["features"], expected, rtol=1e-4, atol=1e-5)
    assert given["entropy_bonus"] == 0.5 and given["nearest_neighbor"]


def test_without_these_options_no_features_are_computed(tiny_flux_dir, tmp_path, seen):
    assert train(tiny_options(tiny_flux_dir, tmp_path, num_epochs=1)).run.features is None
    assert seen[0][1]["features"] is None


def test_kappa_of_an_epoch_and_prompts_that_must_be_open(tiny_flux_dir, tmp_path):
    with fake_judge.FakeJudge() as judge:
        rewards = {"consistency_score": 1.0, "between_images": 8.0}
        options = tiny_options(
            tiny_flux_dir, tmp_path, num_epochs=1, train__reward_fn=rewards,
            train__reward_fn_kwargs={name: {"base_url": judge.url} for name in rewards},
        )  # fmt: skip
        with pytest.raises(ConfigError, match="between_images.*open"):
            build_run(options)
        file = tmp_path / "prompts" / "train_metadata.jsonl"
        lines = [json.loads(line) | {"open": True} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        train(dataclasses.replace(options, run_name="open"))
        (row,) = rows_of(dataclasses.replace(options, run_name="open"), "train")
    within, between = row["reward/consistency_score_mean"], 1 - row["reward/between_images_mean"]
    assert (row["reward/within"], row["reward/between"]) == pytest.approx((within, between))
    assert row["reward/kappa"] == pytest.approx((within - between) / (1 - between))
