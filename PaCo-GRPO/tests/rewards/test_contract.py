"""What a reward is told of its run: its beginning and end, seeds and epochs; in several processes."""

import json
import re

import pytest
import reward_factories
from forked_runs import run_to_end
from reward_factories import checked
from tiny_run import load_script, tiny_options, train

from paco_grpo.item import Item
from paco_grpo.rewards import asking, judge, server
from paco_grpo.rewards.contract import RewardRun
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.rewards.sets import merge_sets
from paco_grpo.training.resume import TrainingStopped
from paco_grpo.training.sample import GroupSampler
from paco_judge.files import read_json_lines

TOLD = "reward_factories:told"


def changes(folder, **arguments):
    kwargs = {"file": f"{folder}/told", **arguments}
    return {
        "train__reward_fn": json.dumps({TOLD: 1.0}),
        "train__reward_fn_kwargs": json.dumps({TOLD: kwargs}),
        "eval_freq": 1,
        "sample__reward_batch_size": 99,  # one call in an epoch
    }


def words(folder, rank=0):
    """What the reward was told: first, of images, and last."""
    first, *others, last = (folder / f"told_{rank}").read_text().splitlines()
    return first, sorted(line for line in others if not line.startswith("now ")), last


def in_words(file, epoch):
    return [f"{epoch} {row['item_id']} {row['seed']}" for row in read_json_lines(file)]


def test_each_process_is_told_its_run_and_of_each_image_its_seed_and_epoch(tiny_flux_dir, tmp_path):
    run_to_end(tiny_flux_dir, tmp_path, 2, num_epochs=1, **changes(tmp_path))
    folder = tmp_path / "runs" / "run"
    expected = []
    for epoch in range(2):
        expected += in_words(folder / "eval" / f"epoch_{epoch:04d}" / "eval_data.jsonl", epoch)
    groups = GroupSampler([4], [2], 8, tiny_options(tiny_flux_dir, tmp_path).seed)
    samples = groups.samples(0)
    for item_id, seed in zip(samples.item_ids, samples.seeds, strict=True):
        expected.append(f"1 {item_id} {seed}")
    scored = []
    for rank in range(2):
        first, others, last = words(tmp_path, rank)
        assert (first, last) == (f"{folder} {rank} 2 from 0", "closed")
        scored += others
        followed = re.findall("now (.*)", (tmp_path / f"told_{rank}").read_text())
        sampling = [f"sampling {done} 16" for done in (0, 8, 16)]  # images of both processes
        assert followed == ["evaluation 0 0", *sampling, "training 0 0", "evaluation 0 0"]
    assert sorted(scored) == sorted(expected)

    (tmp_path / "told_0").unlink()
    command = ["--config", f"{folder}/config.yaml", "--output", f"{tmp_path}/evaluated"]
    assert load_script("evaluate").main(command) == 0
    expected = in_words(tmp_path / "evaluated" / "eval_data.jsonl", None)
    assert words(tmp_path) == (
        f"{tmp_path}/evaluated 0 1 from 0",
        sorted(expected),
        "closed",
    )


def test_a_reward_that_raises_ends_the_run_which_is_saved_and_closes_its_rewards(
    tiny_flux_dir, tmp_path
):
    fails = changes(tmp_path, fails_in=2) | {"save_freq": 0}
    with pytest.raises(TrainingStopped, match="the reward broke"):
        train(tiny_options(tiny_flux_dir, tmp_path, **fails))
    _, others, last = words(tmp_path)
    assert last == "closed" not in others
    assert (tmp_path / "runs" / "run" / "checkpoints" / "epoch_0001").is_dir()


def test_rewards_of_several_sets_begin_and_end_once_and_get_their_own_seeds(tmp_path, caplog):
    """Once all have ended, an error of one says no more than that."""
    one, two = (checked(reward_factories.seeds_of(factor)) for factor in (10, 1000))
    (reward,) = merge_sets([{"a": one}, {"a": two}, {}], "abc").values()
    items = [Item(number, "p", dataset=number % 2) for number in range(4)]
    assert reward("wxyz", items, [1, 2, 3, 4], 5).tolist() == [15, 2005, 35, 4005]
    run = RewardRun(tmp_path, 0, 1, lambda value: value)
    for each in (reward, one, reward):
        each.begin(run)
        each.close()
    assert one.function.calls == two.function.calls == [run, "closed"]
    assert caplog.text.count("wrong was not closed: it is broken") == 2


def test_what_earlier_versions_had_still_works():
    """Import paths, a reward's ``weights``, and whose number it is in the record of a run."""
    for name in server.__all__:
        assert getattr(server, name) is vars(asking).get(name, vars(judge).get(name))
    place = "paco_grpo.rewards.server:ConsistencyScore"
    rewards = build_rewards({place: 1.0, "jpeg_compressibility": 1.0})
    assert type(rewards["ConsistencyScore"].function) is judge.ConsistencyScore
    place = "paco_grpo.rewards.jpeg:jpeg_compressibility"
    assert rewards["jpeg_compressibility"].weights() == place
    for attribute in ("weights", "identity"):
        reward = checked(reward_factories.no_scores())
        setattr(reward.function, attribute, lambda: "org/model@1")
        assert reward.identity()["weights"] == "org/model@1"
