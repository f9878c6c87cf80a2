"""What a reward is told of its run: that it begins and ends, epochs and seeds; in several processes."""

import json

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
from paco_judge.errors import UserError
from paco_judge.files import read_json_lines

TOLD = ("told", "told_together")


def reward_options(folder, **arguments):
    names = [f"reward_factories:{name}" for name in TOLD]
    kwargs = {"file": str(folder / "told"), **arguments}
    return {
        "train__reward_fn": json.dumps(dict.fromkeys(names, 1.0)),
        "train__reward_fn_kwargs": json.dumps(dict.fromkeys(names, kwargs)),
    }


def words(folder, name, rank=0):
    lines = (folder / f"told.{name}.{rank}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_process_is_told_its_run_and_of_each_image_its_seed_and_epoch(tiny_flux_dir, tmp_path):
    changes = {"num_epochs": 2, "eval_freq": 1} | reward_options(tmp_path)
    run_to_end(tiny_flux_dir, tmp_path, 2, **changes)
    folder = tmp_path / "runs" / "run"
    groups = GroupSampler([4], [2], 8, tiny_options(tiny_flux_dir, tmp_path).seed)
    expected = []
    for epoch in range(2):
        samples = groups.samples(epoch)
        for item_id, seed in zip(samples.item_ids.tolist(), samples.seeds.tolist(), strict=True):
            expected.append([epoch + 1, item_id, seed])
    for epoch in range(3):
        for row in read_json_lines(folder / "eval" / f"epoch_{epoch:04d}" / "eval_data.jsonl"):
            expected.append([epoch, row["item_id"], row["seed"]])
    for name in TOLD:
        scored = []
        for rank in range(2):
            first, *others, last = words(tmp_path, name, rank)
            assert (first, last) == (["begin", str(folder), rank, 2, "token 0"], ["close"])
            scored += others
        assert sorted(scored) == sorted(expected)

    output = tmp_path / "evaluated"
    (tmp_path / "told.told.0").unlink()
    evaluate = ["--config", str(folder / "config.yaml"), "--output", str(output)]
    assert load_script("evaluate").main(evaluate) == 0
    first, *others, last = words(tmp_path, "told")
    assert (first, last) == (["begin", str(output), 0, 1, "token 0"], ["close"])
    rows = read_json_lines(output / "eval_data.jsonl")
    assert sorted(others) == sorted([None, row["item_id"], row["seed"]] for row in rows)


@pytest.mark.parametrize("fault", ["signal", "error"])
def test_a_run_that_ends_early_closes_its_rewards(tiny_flux_dir, tmp_path, fault):
    changes = {"num_epochs": 3} | reward_options(tmp_path, fault=fault)
    with pytest.raises(TrainingStopped):
        train(tiny_options(tiny_flux_dir, tmp_path, **changes))
    for name in TOLD:
        kinds = [line[0] for line in words(tmp_path, name)]
        assert kinds.count("begin") == kinds.count("close") == 1 and kinds[-1] == "close"


def test_a_reward_of_several_sets_begins_and_ends_once_and_tells_seeds_apart(tmp_path):
    one, two = (checked(reward_factories.seeds_of(factor)) for factor in (10, 1000))
    (reward,) = merge_sets([{"a": one}, {"a": two}, {}], "abc").values()
    items = [Item(number, "p", dataset=number % 2) for number in range(4)]
    assert reward("wxyz", items, [1, 2, 3, 4], 5).tolist() == [15, 2005, 35, 4005]
    run = RewardRun(tmp_path, 0, 1, lambda value: value)
    for each in (reward, one, reward):
        each.begin(run)
        each.close()
    assert one.function.calls == two.function.calls == [run, "closed"]


def test_what_cannot_begin_is_named_and_what_cannot_close_is_logged(tmp_path, caplog):
    reward = checked(reward_factories.no_scores())
    reward.function.begin = reward.function.close = lambda *_: 1 / len("")
    reward.function.begin = lambda run: (run.folder / "absent").read_text()
    with pytest.raises(UserError, match="'wrong' cannot be used.*absent"):
        reward.begin(RewardRun(tmp_path, 0, 1, lambda value: value))
    reward.close()
    assert "wrong was not closed: division by zero" in caplog.text


def test_what_earlier_versions_had_still_works():
    """Import paths, a reward's ``weights``, and whose number it is in the record of a run."""
    names = ("ConsistencyScore", "JudgeReward", "ServerReward", "plain_images")
    for name in names:
        assert getattr(server, name) is getattr(asking, name, getattr(judge, name, None))
    before, now = "paco_grpo.rewards.server:ConsistencyScore", "consistency_score"
    old, new = (build_rewards({name: 1.0}).popitem()[1] for name in (before, now))
    assert type(old.function) is type(new.function) and old.record == new.record
    jpeg = build_rewards({"jpeg_compressibility": 1.0})["jpeg_compressibility"]
    assert jpeg.weights() == "paco_grpo.rewards.jpeg:jpeg_compressibility"
    for attribute in ("weights", "identity"):
        reward = checked(reward_factories.no_scores())
        setattr(reward.function, attribute, lambda: "org/model@1")
        assert reward.identity()["weights"] == "org/model@1"
