"""The best evaluation: which one it is, by hand, and that its weights are kept."""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_run
from tiny_run import rows_of, tiny_options, train

from paco_grpo.data.sets import prompt_sets
from paco_grpo.options import make_options
from paco_grpo.report.run import read_run
from paco_grpo.training import checkpoints as ckpt
from paco_grpo.training.best import (
    BEST_EPOCH,
    TRAINED_REWARD,
    BestEvaluation,
    best_evaluation,
    trained_reward,
)
from paco_grpo.training.build import build_run, training_rewards
from paco_grpo.training.resume import load_state
from paco_judge.files import write_json_lines

SCRIPTED = "reward_factories:scripted"


# --- which one ------------------------------------------------------------------------------------


def evaluation(epoch, reward, guard=0.5, judge=0.5):
    row = {"phase": "eval", "epoch": epoch, "eval/guard_mean": guard, "eval/judge_mean": judge}
    row |= {"eval/guard_stderr": 0.01, "eval/judge_stderr": 0.01, "eval/num_images": 7}
    return row if reward is None else row | {TRAINED_REWARD: reward}


def epoch_row(epoch, **numbers):
    return {"phase": "train", "epoch": epoch, "health/velocity_change": 0.1} | numbers


WELL = [evaluation(0, 0.2), epoch_row(2), evaluation(2, 0.6), epoch_row(4), evaluation(4, 0.4)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (WELL, 2),
        ([*WELL, evaluation(6, 0.6)], 2),  # the earliest of equal ones
        ([*WELL, epoch_row(6), evaluation(6, 0.7, guard=0.3, judge=0.9)], 2),  # a fallen guard
        ([*WELL, epoch_row(6, **{"health/velocity_change": 0.8}), evaluation(6, 0.7)], 2),
        ([*WELL, epoch_row(6, not_finite=["health/latent_std"]), evaluation(6, 0.7)], 2),
        ([*WELL, epoch_row(6, not_finite=["train/kl"]), evaluation(6, 0.7)], 6),
        ([*WELL, epoch_row(5, **{"health/velocity_change": 0.8}), evaluation(6, 0.7)], 6),
        ([*WELL, evaluation(6, None)], 2),
        ([epoch_row(3, **{"health/velocity_change": 0.8}), evaluation(3, -0.1)], 3),  # the first
        ([evaluation(0, None), evaluation(2, None)], None),
        ([], None),
    ],
)
def test_which_evaluation_is_the_best(rows, expected):
    best = best_evaluation(rows, {"eval/": ["judge"]})
    assert (best and best["epoch"]) == expected


def test_an_evaluation_whose_weights_are_gone_is_not_the_best():
    assert best_evaluation(WELL, {"eval/": ["judge"]}, {0, 4})["epoch"] == 4
    assert best_evaluation(WELL, {"eval/": ["judge"]}, {7}) is None


# --- the trained reward ---------------------------------------------------------------------------

FIRST = {"a": [0.1, 0.4, 0.5, 0.2], "b": [2.0, 2.5, 7.0, 3.0], "watched": [9, 9, 9, 9]}
NOW = {"a": [0.3, 0.9, None, 0.7], "b": [4.0, 1.0, 6.0, 3.0], "watched": [1, None, 5, 2]}
KEPT = [0, 1, 3]  # images of NOW that have both


def measure(options, *evaluations):
    """The trained reward of the last of ``evaluations``: rows of eval_data.jsonl of each."""
    sets = prompt_sets(options)
    of_sets = [training_rewards(prompt_set, options) for prompt_set in sets]
    return trained_reward(evaluations[-1], evaluations[0], sets, of_sets, options)


def rows_with(scores, ids=(0, 1, 2, 1), **fields):
    rows = []
    for number, item in enumerate(ids):
        rewards = {name: values[number] for name, values in scores.items()}
        rows.append({"item_id": item, "prompt": f"p{item}", "rewards": rewards} | fields)
    return rows


def options_with(weights, **changes):
    overrides = [(name.replace("__", "."), str(value)) for name, value in changes.items()]
    return make_options({"dataset": "x", "train": {"reward_fn": weights}}, overrides)


def columns(table, names="ab", rows=KEPT):
    return [np.array(table[name], float)[rows] for name in names]


POSITIVE = {"a": 2.0, "b": 3.0}


def test_aggregations_are_those_of_training():
    """``log_tame`` tames what it would in the first evaluation: b, which varies less now. What an
    aggregation remembers of training, evaluations leave alone.
    """
    a, b = columns(NOW)
    first_a, first_b = columns(FIRST, rows=range(4))
    cv = first_b.std() / first_b.mean()
    assert first_a.std() / first_a.mean() < cv and b.std() / b.mean() < cv - 0.01
    tame = {"name": "log_tame_aggregate_fn", "arguments": {"threshold": cv - 0.001}}
    in_spreads = (2 * a / first_a.std() + 3 * b / first_b.std()).mean()
    expected = {
        "product_aggregate_fn": (a**2 * b**3).mean(),
        "geometric_mean_aggregate_fn": np.sqrt(a * b).mean(),
        "tiny_run:worst": np.minimum(a, b).mean(),
        json.dumps(tame): (2 * a + 3 * np.log1p(b)).mean(),
        "weighted_advantage_sum_aggregate_fn": in_spreads,
    }
    for aggregate_fn, value in expected.items():
        options = options_with(POSITIVE, train__aggregate_fn=aggregate_fn)
        measured = measure(options, rows_with(FIRST), rows_with(NOW))
        assert measured == pytest.approx(value), aggregate_fn
    assert tiny_run.worst.calls == 0
    ranked = options_with(POSITIVE, train__rank_grpo=True)
    measured = measure(ranked, rows_with(FIRST), rows_with(NOW))
    assert measured == pytest.approx(in_spreads)


def test_rewards_that_the_evaluation_lacks_do_not_count():
    """b is not among its rewards, or compares images where each prompt has one."""
    options = options_with(POSITIVE, train__aggregate_fn="product_aggregate_fn")
    (a,) = columns(NOW, "a", [0, 1, 3])
    for b in ({}, {"b": [None] * 4}):
        evaluations = [rows_with({"a": table["a"]} | b) for table in (FIRST, NOW)]
        measured = measure(options, *evaluations)
        assert measured == pytest.approx((a**2).mean())
    # Absent only now, it would make the number another one.
    none_now = rows_with(NOW | {"b": [None] * 4})
    assert measure(options, rows_with(FIRST), none_now) is None
    assert measure(options, rows_with({"watched": [1, 2, 3, 4]})) is None


def test_an_aggregation_that_fails_ends_no_run(tmp_path, caplog):
    options = options_with(POSITIVE, train__aggregate_fn="geometric_mean_aggregate_fn")
    negative = rows_with(NOW | {"a": [-1, 2, 3, 4]})
    sets = prompt_sets(options)
    of_sets = [training_rewards(prompt_set, options) for prompt_set in sets]
    run = SimpleNamespace(folder=tmp_path, prompt_sets=sets, set_rewards=of_sets, options=options)
    for epoch, rows in enumerate((rows_with(FIRST), negative)):
        folder = tmp_path / "eval" / ckpt.checkpoint_name(epoch)
        write_json_lines(folder / "eval_data.jsonl", rows)
    rows = [evaluation(epoch, 0.5) for epoch in range(2)]
    BestEvaluation(run)._measure(rows, rows)
    assert rows[0][TRAINED_REWARD] != 0.5 and TRAINED_REWARD not in rows[1]
    assert "after epoch 1" in caplog.text and "'a' reaches -1" in caplog.text


def test_sets_count_by_share_in_units_of_their_spread():
    sets = {
        "x": {"folder": "x", "share": 1.5, "reward_fn": {"a": 2.0, "b": 3.0}},
        "y": {"folder": "y", "share": 0.5, "reward_fn": {"c": -4.0}},
        "unmeasured": {"folder": "y", "share": 7.0, "reward_fn": {"other": 1.0}},
    }
    options = make_options({"datasets": sets})
    first_c = np.array([5.0, 9.0, 4.0, 4.0])
    now_c = np.array([1.0, 2.0, 3.0, 5.0])
    evaluations = []
    for table, c in ((FIRST, first_c), (NOW, now_c)):
        rows = rows_with(table, dataset="x") + rows_with({"c": c.tolist()}, dataset="y")
        evaluations.append(rows + rows_with({"a": [1, 2, 3, 4]}, dataset="unmeasured"))
    totals = [2 * a + 3 * b for a, b in (columns(FIRST, rows=range(4)), columns(NOW))]
    x = totals[1].mean() / totals[0].std()
    y = -4 * now_c.mean() / (4 * first_c.std())
    measured = measure(options, *evaluations)
    assert measured == pytest.approx((1.5 * x + 0.5 * y) / 2)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def scripted(tiny_flux_dir, tmp_path):
    """Options of a run whose evaluations give ``values``, one after the other."""

    def of(values, **changes):
        small = {
            "eval_freq": 1,
            "save_freq": 3,
            "num_checkpoint_limit": 1,
            "num_epochs": len(values) - 1,
            "sample__reward_batch_size": 8,
            "train__reward_fn": json.dumps({SCRIPTED: 2.0, "tiny_run:brightness": 1e-9}),
            "test__reward_fn": json.dumps({SCRIPTED: 1.0}),
            "test__reward_fn_kwargs": json.dumps({SCRIPTED: {"values": values}}),
        }
        return tiny_options(tiny_flux_dir, tmp_path, **small | changes)

    return of


def kept(folder):
    return [path.name for path in ckpt.list_checkpoints(folder / "checkpoints")]


def test_the_best_is_kept_linked_and_named(scripted, caplog):
    """After epoch 1, where no checkpoint was due."""
    caplog.set_level("INFO")
    options = scripted([0.3, 0.9, 0.5, 0.4, 0.6])
    folder = train(options).run.folder
    rewards = [row[TRAINED_REWARD] for row in rows_of(options, "eval")]
    assert rewards == pytest.approx([0.6, 1.8, 1.0, 0.8, 1.2])
    assert [row[BEST_EPOCH] for row in rows_of(options, "eval")] == [0, 1, 1, 1, 1]
    assert kept(folder) == ["epoch_0001", "epoch_0004"]
    assert os.readlink(folder / "best") == "checkpoints/epoch_0001"
    sheet = folder / "eval" / "epoch_0001" / "sheet.png"
    assert (folder / "best" / "diffusers" / "sheet.png").read_bytes() == sheet.read_bytes()
    card = (folder / "best" / "diffusers" / "README.md").read_text()
    assert "After 1 epochs, 5 images at 32 px: scripted 0.9000" in card
    assert "Before training: scripted 0.3000" in card and card.count("## Evaluation") == 1
    last_words = [line for line in caplog.messages if line.startswith("best evaluation")][-1]
    assert "after epoch 1, trained reward 1.8" in last_words and "epoch_0001" in last_words
    assert read_run(folder).best["epoch"] == 1


def test_a_superseded_best_is_set_aside(trained_run, tiny_flux_dir, tmp_path):
    """Its row and link, too; with another weight, the numbers of what remains are others."""
    shutil.copytree(trained_run.options.dataset, tmp_path / "prompts")
    folder = shutil.copytree(trained_run.folder, tmp_path / "runs" / "run", symlinks=True)
    rows = [evaluation(epoch, value) for epoch, value in enumerate((0.3, 0.4, 0.5))]
    write_json_lines(folder / "metrics.jsonl", rows)
    whole = folder / "checkpoints" / "epoch_0001" / "transformer"  # as of one that is trained whole
    whole.mkdir()
    for epoch, value in enumerate((7.0, 4.0, 5.0)):
        scored = rows_with({"brightness": [value] * 4})
        write_json_lines(folder / "eval" / ckpt.checkpoint_name(epoch) / "eval_data.jsonl", scored)
    (folder / "eval" / "epoch_0001" / "sheet.png").write_bytes(b"sheet")
    ckpt.link(folder / "best", folder / "checkpoints" / "epoch_0002")
    weight = {"train__reward_fn": json.dumps({"tiny_run:brightness": -2.0})}
    checkpoint = tmp_path / "link"
    checkpoint.symlink_to(folder / "checkpoints" / "epoch_0001")
    changes = weight | {"resume_from": checkpoint, "num_checkpoint_limit": 1}
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))
    load_state(run)
    best = BestEvaluation(run)
    best.find_again()
    assert [row[TRAINED_REWARD] for row in run.metrics.rows()] == [-14.0, -8.0]
    assert run.metrics.rows()[-1][BEST_EPOCH] == run.checkpoints.best == 1
    assert os.readlink(folder / "best") == "checkpoints/epoch_0001"
    assert (folder / "checkpoints" / "replaced_epoch_0002").is_dir()
    assert (folder / "best" / "transformer" / "sheet.png").read_bytes() == b"sheet"
    run.metrics.replace(rows[1:2])
    best.find_again()
    card = (folder / "best" / "diffusers" / "README.md").read_text()
    assert "After 1 epochs" in card and "Before training" not in card
    run.metrics.replace(rows[:1])
    best.find_again()
    assert not (folder / "best").is_symlink()  # the weights before training have no checkpoint
    scored = rows_with({"guard": [0.5] * 4})
    write_json_lines(folder / "eval" / "epoch_0000" / "eval_data.jsonl", scored)
    run.metrics.replace([rows[0] | {BEST_EPOCH: 0}])
    best.find_again()
    assert BEST_EPOCH not in run.metrics.rows()[0]  # nothing measures the trained reward any more
    for epoch in (3, 4):
        (folder / "checkpoints" / ckpt.checkpoint_name(epoch) / "state").mkdir(parents=True)
    for best_epoch, expected in ((3, ["epoch_0003", "epoch_0004"]), (4, ["epoch_0004"])):
        run.checkpoints.mark_best(best_epoch)
        assert kept(folder) == expected
    run.close()
