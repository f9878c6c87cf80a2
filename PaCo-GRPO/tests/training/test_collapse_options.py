"""Options against collapse in a tiny run: w − b is in metrics.jsonl, and prompts must be open."""

import pytest
from fakes import fake_judge
from tiny_run import rows_of, tiny_options, train, write_prompts

from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run


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
