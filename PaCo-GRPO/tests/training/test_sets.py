"""Several prompt sets in one run: an image is scored, compared and reported with its own set.

The sets differ in everything: size, share, prompts, rewards, weights, arguments.
"""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_runs import (
    COMPARABLE,
    TOLERANCE,
    assert_same_training,
    observed,
    run_to_end,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from named import CONFIG, load
from tiny_run import sampled, tiny_options, train, write_rows

from paco_grpo.data.sets import (
    divide,
    load_items,
    prompt_sets,
    reward_arguments,
)
from paco_grpo.distributed import Shares
from paco_grpo.options import ConfigError, load_options, make_options, options_to_yaml
from paco_grpo.rewards.registry import build_rewards, watched_rewards
from paco_grpo.rewards.sets import merge_sets
from paco_grpo.training.build import build_run, training_rewards
from paco_grpo.training.checks import contradictions
from paco_grpo.training.sample import GroupSampler

ASKED = "reward_factories:of_set"
OTHERS = "reward_factories:spread_of_set"
ROWS = {"large": {"train": 5, "test": 2}, "small": {"train": 2, "test": 1}}


def write_sets(folder: Path) -> None:
    for name, counts in ROWS.items():
        for split, count in counts.items():
            rows = []
            for number in range(count):
                prompt = f"{name} {split} {'x' * number} 1x2 grid. [LEFT]: a{number}. [RIGHT]: b."
                rows.append({"prompt": prompt, "idx": f"{name}{number}"})
            write_rows(folder / name, split, rows)


def sets_in(folder: Path) -> dict:
    """``config.datasets``: three prompts of ``large`` for one of ``small``."""
    return {
        "small": {
            "folder": str(folder / "small"),
            "share": 0.5,
            "reward_fn": {ASKED: 2.0, OTHERS: 3.0},
            "reward_fn_kwargs": {
                ASKED: {"begins": "small", "factor": 5.0},
                OTHERS: {"begins": "small"},
            },
            "test_reward_fn": {ASKED: 1.0, "tiny_run:redness": 0.0},
        },
        "large": {"folder": str(folder / "large"), "share": 1.5, "test_reward_fn": {ASKED: 1.0}},
    }


def set_changes(folder: Path) -> dict:
    """Options of a tiny run on both sets, whose prompts are written to ``folder``."""
    if not (folder / "large").is_dir():
        write_sets(folder)
    return {
        "dataset": "",
        "datasets": json.dumps(sets_in(folder)),
        "train__reward_fn": json.dumps({ASKED: 1.0}),
        "train__reward_fn_kwargs": json.dumps({ASKED: {"begins": "large", "factor": 7.0}}),
        "sample__unique_sample_num_per_epoch": 4,
        "sample__num_images_per_prompt": 3,
        "sample__global_std": True,
        "sample__batch_size": 2,  # divides the 12 images among two processes, too
        "test__num_images": 5,
    }


# --- options and items ---------------------------------------------------------------------------


def test_a_set_takes_from_the_run_what_it_does_not_say(tmp_path):
    write_sets(tmp_path)
    options = make_options(
        {
            "datasets": sets_in(tmp_path),
            "train": {"reward_fn": {ASKED: 1.0}, "reward_fn_kwargs": {ASKED: {"factor": 7.0}}},
            "test": {"reward_fn": {OTHERS: 4.0}, "reward_fn_kwargs": {OTHERS: {"begins": "x"}}},
        },
        [
            ("datasets.large.share", "2.5"),
            ("datasets.large.test_reward_fn", ""),
            (f"datasets.small.reward_fn.{ASKED}", "6"),
            (f"datasets.small.reward_fn_kwargs.{ASKED}.factor", "8"),
        ],
    )
    large, small = prompt_sets(options)
    assert (large.name, large.share, small.name, small.share) == ("large", 2.5, "small", 0.5)
    assert (large.train.weights, small.train.weights) == ({ASKED: 1}, {ASKED: 6, OTHERS: 3})
    assert (large.test.weights, small.test.weights) == (
        {OTHERS: 4},
        {ASKED: 1, "tiny_run:redness": 0},
    )
    assert large.train.kwargs == {ASKED: {"factor": 7}}
    assert large.test.kwargs == {OTHERS: {"begins": "x"}}
    assert small.train.kwargs[ASKED]["factor"] == small.test.kwargs[ASKED]["factor"] == 8
    with pytest.raises(ConfigError, match=ASKED):
        reward_arguments(options, ASKED)
    assert reward_arguments(options, OTHERS) == small.train.kwargs[OTHERS]
    items = load_items([large, small], "train")
    assert [item.item_id for item in items] == list(range(7))
    assert [item.dataset for item in items] == [0, 0, 0, 0, 0, 1, 1]
    assert [item.metadata["idx"] for item in items[4:]] == ["large4", "small0", "small1"]
    saved = tmp_path / "config.yaml"
    saved.write_text(options_to_yaml(options))
    assert load_options(str(saved)) == options


def test_what_a_set_is_trained_on_and_what_is_only_watched():
    """A negative weight is one to train on; the spread is the one that the run asks for."""
    values = {
        "datasets": {"one": {"folder": "x", "reward_fn": {ASKED: -2.0, OTHERS: 0.0}}},
        "train": {"aggregate_fn": "weighted_advantage_sum_aggregate_fn"},
        "sample": {"global_std": True},
    }
    options = make_options(values, [])
    (prompt_set,) = prompt_sets(options)
    trained = training_rewards(prompt_set, options)
    assert trained.weights == trained.aggregate_fn.reward_weights == {"of_set": -2.0}
    assert trained.aggregate_fn.global_std
    assert watched_rewards([prompt_set.train.weights]) == ["spread_of_set"]


def test_scores_of_other_arguments_in_one_set_are_other_scores():
    """By which an evaluation is scored again. Threads are as many as each of them takes."""
    of_sets = []
    for limit in (3, 5):
        kwargs = {"consistency_score": {"max_concurrency": limit}}
        of_sets.append(build_rewards({"consistency_score": 1.0}, kwargs))
    assert merge_sets(of_sets, "ab")["consistency_score"].parallel_calls == 3
    identities = []
    for factor in (2.0, 3.0):
        of_sets = []
        for times in (1.0, factor):
            kwargs = {"begins": "x", "factor": times}
            of_sets.append(build_rewards({ASKED: 1.0}, {ASKED: kwargs}))
        identities.append(merge_sets(of_sets, "ab")["of_set"].identity())
    assert identities[0] != identities[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"datasets.small.shares": "2"}, ["datasets.small.shares", "share"]),
        ({"datasets.small.share": "0.01"}, ["datasets.small.share", "42"]),
        ({f"datasets.small.reward_fn_kwargs.{OTHERS}s.begins": "x"}, ["datasets.small", OTHERS]),
        ({"dataset": "x"}, ["dataset='x'", "datasets"]),
        ({}, []),
    ],
)
def test_what_is_wrong_with_sets_is_said_before_anything_is_read(changes, named):
    values = {"datasets": sets_in(Path("/nowhere")), "train": {"reward_fn": {ASKED: 1.0}}}
    try:
        problems = contradictions(make_options(values, changes.items()))
    except ConfigError as error:
        problems = str(error).splitlines()
    assert len(problems) == bool(changes)
    for name in named:
        assert name in problems[0]


def test_the_example_of_the_page_is_right(tmp_path):
    page = (CONFIG.parents[1] / "docs" / "rewards.md").read_text()
    (code,) = re.findall(r"```python\n(def my_sets.*?)```", page, flags=re.DOTALL)
    (tmp_path / "mine.py").write_text((CONFIG / "grpo.py").read_text() + code)
    options = load_options(f"{tmp_path / 'mine.py'}:my_sets_48gb")
    assert contradictions(options) == []
    shares = [prompt_set.share for prompt_set in prompt_sets(options)]
    assert divide(8, shares) == [4, 2, 2]  # full, keep, open


def test_open_prompts_of_a_folder_are_a_set_of_their_own(tmp_path):
    rows = [{"prompt": f"{i} 1x2 [LEFT]: a. [RIGHT]: b.", "open": i in (1, 2)} for i in range(5)]
    write_rows(tmp_path, "test", rows)
    changes = [(f"datasets.{name}.folder", str(tmp_path)) for name in ("full", "open")]
    items = load_items(prompt_sets(load("toy_t2is_sets", *changes)), "test")
    assert [item.prompt[0] for item in items] == ["0", "3", "4", "1", "2"]
    assert [item.dataset for item in items] == [0, 0, 0, 1, 1]


@given(total=st.integers(0, 60), shares=st.lists(st.floats(0.05, 20), min_size=1, max_size=5))
def test_an_epoch_is_divided_by_shares(total, shares):
    parts = divide(total, shares)
    assert sum(parts) == total
    more = divide(total + 1, shares)
    assert all(0 <= after - before <= 1 for before, after in zip(parts, more, strict=True))
    assert divide(120, [3.0, 2.0, 1.0]) == [60, 40, 20]
    assert divide(2, [1.1, 3.0]) == [1, 1]  # a small set does not wait for a whole share


def test_each_set_draws_its_own_prompts():
    """The first as if it were alone; how many, and their noises: test_whole_run.py."""
    sampler = GroupSampler([7, 3, 7], [3, 1, 3], 4, seed=5)
    alone = GroupSampler([7], [3], 4, seed=5)
    for epoch in range(2):
        ids = sampler.samples(epoch).item_ids
        assert set(ids[ids < 7]) == set(alone.samples(epoch).item_ids)
        assert set(ids[ids < 7]) != set(ids[ids >= 10] - 10)


# --- whole runs ----------------------------------------------------------------------------------


def test_a_run_is_not_resumed_with_a_changed_set(tiny_flux_dir, tmp_path, caplog):
    """Not with other prompts. With another share or other rewards it goes on, and the log names them."""
    changes = set_changes(tmp_path)
    train(tiny_options(tiny_flux_dir, tmp_path, num_epochs=0, **changes))
    again = changes | {"resume_from": "latest"}
    for set_name, values in (("small", {"open": False}), ("other", {})):
        sets = sets_in(tmp_path)
        sets[set_name] = sets.pop("small") | values
        other = again | {"datasets": json.dumps(sets)}
        with pytest.raises(ConfigError, match="config.dataset .*other files"):
            build_run(tiny_options(tiny_flux_dir, tmp_path, **other))
    sets = sets_in(tmp_path)
    sets["small"] |= {"share": 1.5, "reward_fn": {ASKED: 4.0, OTHERS: 0.5}}
    other = again | {"datasets": json.dumps(sets)}
    caplog.clear()
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **other))
    run.close()
    assert "another config.datasets" in caplog.text
    assert run.sampler.groups.prompts == [2, 2]
    assert run.set_rewards[1].weights == {"of_set": 4.0, "spread_of_set": 0.5}


def test_a_trained_image_knows_its_set(tiny_flux_dir, tmp_path):
    """On the second of two processes, where positions and numbers differ."""
    run = build_run(tiny_options(tiny_flux_dir, tmp_path, **set_changes(tmp_path)))
    rollouts, _ = sampled(run)
    second = dataclasses.replace(
        rollouts,
        shares=Shares(1, 2, 12),
        samples=rollouts.samples[1::2],
        keys=rollouts.keys[1::2],
    )
    numbers = set()
    for micro_batch in run.updater._micro_batches(second, np.zeros(12), np.arange(12), 0, 0):
        for step in micro_batch.build_steps():
            items = [run.train_items[item_id] for item_id in step.rollout.item_ids]
            assert step.datasets.tolist() == [item.dataset for item in items]
            numbers.update(step.datasets.tolist())
    assert numbers == {0, 1}


DGPO = {
    "sample__noise_level": 0,
    "train__num_sigmas": 1,
    "train__loss_type": "dgpo",
    "train__dgpo_reference": "slow",
    "train__dgpo_beta": 50.0,
    "train__dgpo_clip_range": 1e-4,
}


@pytest.mark.slow
def test_two_processes_train_sets_as_one(tiny_flux_dir, tmp_path):
    """With dgpo, which weights the images of a group, which are on both."""
    folders = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folders.append(folder)
        write_sets(folder)
        run_to_end(tiny_flux_dir, folder, processes, **COMPARABLE | DGPO | set_changes(folder))
    assert np.count_nonzero(observed(folders[0])["advantages"]) == 24
    assert_same_training(*folders)
    one, two = (weights(folder, "slow") for folder in folders)
    torch.testing.assert_close(two, one, rtol=0, atol=TOLERANCE)
