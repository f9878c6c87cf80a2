"""w, b and w − b: of known answers, of an epoch, evaluate.py --images_per_prompt."""

import json

import numpy as np
import pytest
from tiny_run import load_script, tiny_options, write_prompts

from paco_grpo.commands.evaluate import measuring
from paco_grpo.evaluation.intervals import intervals
from paco_grpo.monitoring.metrics import of_epoch, pairs_of
from paco_grpo.options import ConfigError
from paco_judge.files import read_json_lines

NAMES = ("consistency_score", "between_images")


def rows(within, between, is_open=True) -> list[dict]:
    """Rows of prompts × images; ``between`` is b, not the reward 1 − b; None = missing."""
    prompts = []
    for item, (ws, bs) in enumerate(zip(within, between, strict=True)):
        for w, b in zip(ws, bs, strict=True):
            rewards = {NAMES[0]: w, NAMES[1]: None if b is None else 1 - b}
            row = {"item_id": item, "open": is_open, "rewards": rewards}
            prompts.append(row)
    return prompts


def test_prompts_that_describe_everything_and_missing_answers_do_not_count():
    several = rows([[0.9, 0.8, 0.7, None]], [[0.5, 0.4, None, 0.3]])
    full = [row | {"item_id": 7} for row in rows([[0.5, 0.4]], [[0.0, 0.0]], False)]
    unanswered = [row | {"item_id": 8} for row in rows([[None, None]], [[0.4, 0.6]])]
    measured = intervals(several + full + unanswered)
    assert list(measured) == [*NAMES, "within", "between", "within_minus_between"]
    assert measured["consistency_score"].mean == pytest.approx(0.45)
    assert measured["within"].mean == pytest.approx(0.8)
    assert measured["between"].mean == pytest.approx((0.4 + 0.5) / 2)
    assert measured["within_minus_between"].mean == pytest.approx(0.4)
    assert measured["within_minus_between"].prompts == 1
    assert intervals(full)["within_minus_between"] is None


def test_of_a_training_epoch():
    """Five prompts with two images each.

    The second lacks an answer, the third is not open, the last lack all w, or all b.
    """
    order = np.array([7, 2, 9, 4, 0, 5, 3, 8, 1, 6])  # in which the images were sampled
    w = [0.9, 0.7, 0.5, np.nan, 0.1, 0.1, np.nan, np.nan, 0.3, 0.4]
    difference = [0.5, 0.7, 0.8, 0.8, 0.0, 0.0, 0.9, 0.9, np.nan, np.nan]
    scores = {
        NAMES[0]: np.array(w)[order],
        NAMES[1]: np.array(difference)[order],
        "oracle_consistency": np.ones(10),  # the second pair of rewards
        "oracle_between_images": np.ones(10),
    }
    items = np.repeat(range(5), 2)[order]
    metrics = of_epoch(scores, items, [True, True, False, True, True])
    assert metrics == pytest.approx(
        {"reward/within": 0.65, "reward/between": 0.3, "reward/within_minus_between": 0.35}
    )
    assert of_epoch(scores, items, [False] * 5) == {}
    assert of_epoch({NAMES[0]: np.ones(2)}, items[:2], [True]) == {}


def test_which_rewards_measure_it(tiny_flux_dir, tmp_path):
    oracle = ("oracle_consistency", "oracle_between_images")
    assert pairs_of(["pickscore", *oracle, *NAMES]) == [NAMES, oracle]
    assert pairs_of(["between_images"]) == []
    with pytest.raises(ConfigError, match="consistency_score"):
        measuring(tiny_options(tiny_flux_dir, tmp_path), 4)
    kwargs = {"consistency_score": {"port": 8001}}
    judged = {"test__reward_fn": {"consistency_score": 1.0}, "test__reward_fn_kwargs": kwargs}
    test = measuring(tiny_options(tiny_flux_dir, tmp_path, **judged), 4).test
    assert list(test.reward_fn) == [*NAMES]
    assert test.reward_fn_kwargs["between_images"] == {"port": 8001}


def test_evaluate_with_images_per_prompt(trained_run, tmp_path):
    """Two open prompts, n = 0 and 1, and one that describes everything; w is 3 n, b is 1 − n / 2."""
    prompts = write_prompts(tmp_path / "prompts", test=3, first_open=2)
    rewards = dict.fromkeys(
        ("reward_factories:oracle_consistency", "reward_factories:oracle_between_images"), 1.0
    )
    command = ["--config", str(trained_run.folder / "saved.yaml")]
    command += ["--output", str(tmp_path), "--images_per_prompt", "4"]
    command += [f"--config.dataset={prompts}", f"--config.test.reward_fn={rewards}"]
    assert load_script("evaluate").main(command) == 0
    measured = json.loads((tmp_path / "results.json").read_text())["results"]["adapter"]
    images = read_json_lines(tmp_path / "eval_data.jsonl")
    assert [row["item_id"] for row in images] == [0, 1, 2] * 4
    assert len({row["seed"] for row in images}) == 12
    difference = measured["oracle_within_minus_between"]
    assert (difference["mean"], difference["prompts"]) == (pytest.approx(1.5 - 0.75), 2)
