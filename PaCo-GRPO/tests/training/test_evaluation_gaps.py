"""Evaluations that lack scores: too many stop the run, and a resume evaluates again."""

import math

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

    def of(share=1.0, **changes):
        kwargs = {ABSENT: {"file": str(tmp_path / "absent"), "share": share}}
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


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_too_few_scores_stop_the_run_and_the_evaluation_is_repeated(run, tmp_path, epoch):
    complete = run(run_name="complete")
    train(complete)
    options = run()
    before = {}
    if epoch:  # the evaluations before it are good
        train(run(num_epochs=epoch - 1))
        options = run(resume_from="latest")
        before = means(options)
    (tmp_path / "absent").touch()
    with pytest.raises(
        TrainingStopped, match=f"100% of the images of the evaluation after epoch {epoch} "
    ) as stopped:
        train(options)
    assert stopped.value.signal_number is None and "resume_from=latest" in str(stopped.value)
    if epoch:
        assert means(options) == before  # no row that counts as done
    (tmp_path / "absent").unlink()
    train(run(resume_from="latest"))
    assert means(options) == means(complete)


def test_a_few_missing_scores_are_left_out(run, tmp_path):
    (tmp_path / "absent").touch()
    options = run(num_epochs=1, train__max_missing_reward_fraction=0.5, share=0.4)
    train(options)
    rows = rows_of(options, "eval")
    assert [row["eval/missing_share"] for row in rows] == [0.4, 0.4]
    assert [row["eval/absent_while_missing"] for row in rows] == [0.4, 0.4]


def test_rewards_of_weight_0_may_be_absent(run, tmp_path):
    (tmp_path / "absent").touch()
    options = run(num_epochs=1, test__reward_fn=repr({ABSENT: 0, "tiny_run:brightness": 1}))
    train(options)
    assert [row["eval/missing_share"] for row in rows_of(options, "eval")] == [1, 1]


def test_a_reward_that_compares_images_owes_a_single_one_nothing(run):
    """The evaluation has 5 images of 3 items, so the third is alone."""
    options = run(
        num_epochs=1,
        test__reward_fn=repr({"reward_factories:only_comparing": 1}),
        test__reward_fn_kwargs="{}",
    )
    train(options)
    for row in rows_of(options, "eval"):
        assert row["eval/missing_share"] == 0 and row["eval/only_comparing_mean"] == 0.5


def test_an_evaluation_without_a_finite_image_is_an_error(run, tmp_path, monkeypatch):
    """Its velocities overflow once the first epoch has trained; no score is owed to such images."""
    options = run(train__max_missing_reward_fraction=1)
    built = build_run(options)
    velocity = built.state.policy.velocity

    def overflow(*arguments, **keywords):
        return velocity(*arguments, **keywords) * (1.0 if built.state.epoch == 0 else math.nan)

    built.state.policy.velocity = overflow
    with pytest.raises(TrainingStopped, match="after epoch 1, none of the 5 evaluation images is"):
        Trainer(built).fit()
    assert [row["epoch"] for row in rows_of(options, "eval")] == [0]
