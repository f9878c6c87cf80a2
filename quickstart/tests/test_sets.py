"""Several prompt sets in the toy world: what each is trained on, and that nothing else counts."""

from pathlib import Path

import numpy as np
import pytest

from paco_grpo.options import load_options
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer
from paco_toy.build_world import build_prompts

REPO = Path(__file__).resolve().parents[2]
ORACLE = "paco_toy.oracle:oracle_"


def epoch_of(tmp_path, monkeypatch, datasets, **changes):
    """A short epoch of toy_t2is_sets: its row of metrics, advantages, scores and items by image.

    One image has no score by the first reward.
    """
    folder = tmp_path / "prompts"
    build_prompts(folder, seed=1, train=16, test=4)
    small = {
        "pretrained.model": REPO / "quickstart" / "models" / "flux",
        "datasets": {name: {"folder": str(folder)} | of_set for name, of_set in datasets.items()},
        "train.reward_fn_kwargs": {},
        "test.reward_fn": "",
        "sample.num_steps": 2,
        "sample.num_images_per_prompt": 4,
        "sample.unique_sample_num_per_epoch": 6,
        "train.resolution": 32,
        "train.num_sigmas": 1,
        "save_dir": tmp_path,
        "run_name": "run",
        "logging_platform": "none",
        "health.probe_images": 0,
        "train.max_missing_reward_fraction": 0.2,
    }
    overrides = small | changes
    source = f"{REPO / 'PaCo-GRPO' / 'config' / 'grpo.py'}:toy_t2is_sets"
    options = load_options(source, [(name, str(value)) for name, value in overrides.items()])
    trainer = Trainer(build_run(options))
    run = trainer.run
    seen = {}
    gathered = ScoreQueue.gathered

    def record_scores(queue, *arguments):
        scores = gathered(queue, *arguments)
        # The toy model draws little with 2 steps, so that many images would score alike.
        noise = np.random.default_rng(3).uniform(0.1, 1, scores.shape)
        lost = np.flatnonzero(~np.isnan(scores[:, 0]))[0]
        noise[lost, 0] = np.nan
        scores = np.where(np.isnan(scores), np.nan, noise)
        seen["scores"] = dict(zip(queue.rewards, scores.T, strict=True))
        return scores

    def record_advantages(rollouts, advantages, *_):
        seen["advantages"] = advantages
        seen["items"] = [run.train_items[i] for i in rollouts.item_ids]
        return {"grad_norm": 0.0}

    monkeypatch.setattr(ScoreQueue, "gathered", record_scores)
    monkeypatch.setattr(run.updater, "update", record_advantages)
    trainer.epoch()
    (row,) = run.metrics.rows("train")
    run.close()
    return row, seen


def expected_advantages(seen, totals, global_std=False):
    """From ``totals``: number of a set → its reward of each image."""
    datasets = np.array([item.dataset for item in seen["items"]])
    item_ids = np.array([item.item_id for item in seen["items"]])
    expected = np.zeros(len(item_ids))
    for number, total in totals.items():
        of_set = (datasets == number) & ~np.isnan(total)
        for item_id in np.unique(item_ids[of_set]):
            group = of_set & (item_ids == item_id)
            std = total[of_set].std() if global_std else total[group].std()
            expected[group] = (total[group] - total[group].mean()) / std
    return expected


def test_only_open_prompts_are_asked_for_variety(tmp_path, monkeypatch):
    row, seen = epoch_of(
        tmp_path,
        monkeypatch,
        {
            "full": {"open": False, "share": 1, "reward_fn": {f"{ORACLE}consistency": 1.0}},
            "open": {
                "open": True,
                "share": 2,
                "reward_fn": {f"{ORACLE}consistency": 1.0, f"{ORACLE}between_images": 8.0},
            },
        },
    )
    is_open = np.array([item.metadata["open"] for item in seen["items"]])
    assert is_open.sum() == 16 and len(is_open) == 24
    consistency = seen["scores"]["oracle_consistency"]
    between = seen["scores"]["oracle_between_images"]
    assert (np.isnan(between) == ~is_open).all() and np.isnan(consistency).sum() == 1
    expected = expected_advantages(seen, {0: consistency, 1: consistency * between**8})
    np.testing.assert_allclose(seen["advantages"], expected)
    assert row["set/open/oracle_between_images_mean"] == pytest.approx(between[is_open].mean())
    assert "set/full/oracle_between_images_mean" not in row
    lost_is_open = is_open[np.isnan(consistency)][0]
    shares = [row[f"advantage/{name}/missing_share"] for name in ("full", "open")]
    assert shares == ([0, 1 / 16] if lost_is_open else [1 / 8, 0])
    assert row["reward/missing_share"] == pytest.approx(1 / 24)


def test_consistency_beside_prompts_that_keep_alignment(tmp_path, monkeypatch):
    row, seen = epoch_of(
        tmp_path,
        monkeypatch,
        {
            "consistent": {"share": 2, "reward_fn": {f"{ORACLE}consistency": 3.0}},
            "keep": {
                "share": 1,
                "open": False,
                "reward_fn": {f"{ORACLE}alignment": 0.5, f"{ORACLE}distinct": 2.0},
            },
        },
        **{"train.aggregate_fn": "None", "sample.global_std": "True"},
    )
    scores = seen["scores"]
    keep = 0.5 * scores["oracle_alignment"] + 2 * scores["oracle_distinct"]
    totals = {0: 3 * scores["oracle_consistency"], 1: keep}
    expected = expected_advantages(seen, totals, global_std=True)
    np.testing.assert_allclose(seen["advantages"], expected)
    of_keep = np.array([item.dataset for item in seen["items"]]) == 1
    assert of_keep.sum() == 8
    assert row["set/keep/oracle_distinct_mean"] == pytest.approx(
        scores["oracle_distinct"][of_keep].mean()
    )
    assert np.isnan(scores["oracle_consistency"][of_keep]).all()
