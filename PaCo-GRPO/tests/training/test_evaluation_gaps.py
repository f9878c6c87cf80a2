"""Evaluations that lack scores: too many stop the run, and a resume evaluates again."""

import math
import time

import pytest
from tiny_run import rows_of, tiny_options, train

from paco_grpo.training.build import build_run
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer

ABSENT = "reward_factories:absent_while"


@pytest.fixture
def run(tiny_flux_dir, tmp_path):
    """Options of a run with evaluations after epochs 0, 1 and 2, whose evaluation reward is absent
    while a file exists.
    """

    def of(**changes):
        kwargs = {ABSENT: {"file": str(tmp_path / "absent")}}
        settings = {
            "eval_freq": 1,
            "test__reward_fn": repr({ABSENT: 1}),
            "test__reward_fn_kwargs": repr(kwargs),
            "sample__reward_batch_size": 5,
        }
        return tiny_options(tiny_flux_dir, tmp_path, **(settings | changes))

    return of


def means(options):
    return {row["epoch"]: row.get("eval/absent_while_mean") for row in rows_of(options, "eval")}


def test_too_few_scores_stop_the_run_and_the_evaluation_is_repeated(run, tmp_path):
    train(run(num_epochs=0))  # its evaluation is good
    options = run(resume_from="latest", num_epochs=1)
    before = means(options)
    (tmp_path / "absent").touch()
    with pytest.raises(TrainingStopped, match="epoch 1 .*resume_from"):
        train(options)
    assert means(options) == before  # no row that counts as done
    (tmp_path / "absent").unlink()
    train(options)
    assert list(means(options)) == [0, 1] and None not in means(options).values()


def test_an_evaluation_without_a_finite_image_is_an_error(run, tmp_path, monkeypatch):
    """Its velocities overflow once the first epoch has trained; no score is owed to such images."""
    options = run(train__max_missing_reward_fraction=1)
    built = build_run(options)
    velocity = built.state.policy.velocity

    def overflow(*arguments, **keywords):
        return velocity(*arguments, **keywords) * (1.0 if built.state.epoch == 0 else math.nan)

    built.state.policy.velocity = overflow
    with pytest.raises(TrainingStopped, match="epoch 1"):
        Trainer(built).fit()
    assert [row["epoch"] for row in rows_of(options, "eval")] == [0]


def test_a_reward_that_raises_ends_the_sampling(tiny_flux_dir, tmp_path):
    """Of nine images, its first one is the fourth."""
    failing = {"reward_factories:failing": 1.0}
    changes = {
        "eval_freq": 1,
        "test__reward_fn": failing,
        "test__reward_fn_kwargs": {"reward_factories:failing": {"after": 3}},
        "test__num_images": 9,
        "test__batch_size": 1,
        "sample__reward_batch_size": 1,
    }
    built = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    policy = built.state.policy
    decode = policy.decode
    decoded = []

    def slowly(*arguments):
        decoded.append(time.sleep(0.05))
        return decode(*arguments)

    policy.decode = slowly
    with pytest.raises(TrainingStopped, match="the reward broke at 1 images"):
        Trainer(built).fit()
    assert 4 <= len(decoded) < 9
