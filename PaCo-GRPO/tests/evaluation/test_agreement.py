"""Agreement beyond chance: κ against closed forms, intervals, evaluate.py --images_per_prompt."""

import json

import numpy as np
import pytest
from fakes import fake_judge
from tiny_run import load_script, tiny_options, write_prompts

from paco_grpo.evaluation.agreement import agreement, kappa, measuring, of_epoch, pairs_of, table
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import ConfigError

NAMES = ("consistency_score", "between_images")


def rows(within, between, is_open=True, category=None) -> list[dict]:
    """Rows of prompts × images; ``between`` is b, not the reward 1 − b; None = missing."""
    prompts = []
    for item, (ws, bs) in enumerate(zip(within, between, strict=True)):
        for w, b in zip(ws, bs, strict=True):
            rewards = {NAMES[0]: w, NAMES[1]: None if b is None else 1 - b}
            row = {"item_id": item, "category": category, "open": is_open, "rewards": rewards}
            prompts.append(row)
    return prompts


def test_kappa_of_known_generators():
    assert kappa(1.0, 0.25) == 1  # consistent images that differ
    assert kappa(0.9, 0.9) == 0  # one fixed answer
    assert kappa(0.3, 0.3) == pytest.approx(0)  # no consistency at all
    assert kappa(0.2, 0.6) == pytest.approx(-1)
    assert np.isnan(kappa(1.0, 1.0))


def test_the_interval_of_kappa_is_over_prompts():
    rng = np.random.default_rng(5)
    w = rng.uniform(0.6, 1.0, (40, 4))
    b = rng.uniform(0.1, 0.5, (40, 4))
    measured = agreement(rows(w, b))["all"].kappa
    assert measured.mean == pytest.approx((w.mean() - b.mean()) / (1 - b.mean()))
    # Delete-one jackknife: another estimate of the same standard error.
    left_out = [kappa(np.delete(w, i, 0).mean(), np.delete(b, i, 0).mean()) for i in range(40)]
    stderr = np.std(left_out) * np.sqrt(39)
    assert (measured.high - measured.low) / 2 == pytest.approx(1.96 * stderr, rel=0.1)


def test_prompts_that_describe_everything_have_w_only():
    several = rows([[0.9] * 4], [[0.5] * 4], category="A")
    full = [{**row, "item_id": 7} for row in rows([[0.5] * 4], [[0.0] * 4], False, category="B")]
    measured = agreement(several + full)
    assert list(measured) == ["A", "B", "all"]
    assert measured["B"].within.mean == 0.5
    assert measured["B"].between is None
    assert measured["B"].kappa is None
    assert measured["A"].kappa.mean == pytest.approx(0.8)
    assert measured["all"].kappa.mean == pytest.approx(0.8)
    assert measured["all"].within.mean == pytest.approx(0.7)
    assert "| B | x | 0.5000 | – | – | 0 | 0 |" in table({"x": measured})


def test_missing_answers_are_left_out_and_counted():
    w = [[1.0, None, 0.5, 0.5], [None] * 4]
    b = [[0.2, 0.2, None, 0.2], [0.1] * 4]
    measured = agreement(rows(w, b))["all"]
    assert measured.missing == 6
    assert measured.within.mean == pytest.approx(2 / 3)
    assert measured.kappa.prompts == 1
    assert measured.kappa.mean == pytest.approx((2 / 3 - 0.2) / 0.8)


def test_a_difference_is_paired_by_prompt():
    w = np.array([[0.9] * 4, [0.7] * 4])
    b = np.array([[0.5] * 4, [0.3] * 4])
    difference = agreement(rows(w, b), rows(w - 0.1, b))["all"]
    assert difference.within.mean == pytest.approx(0.1)
    assert difference.within.low == pytest.approx(0.1)
    assert difference.between.mean == pytest.approx(0)
    assert difference.kappa.mean == pytest.approx(0.1 / 0.6)


def test_of_a_training_epoch():
    """Four prompts with two images each.

    The second lacks an answer, the third is not open, the last lacks all w.
    """
    scores = {
        NAMES[0]: np.array([0.9, 0.7, 0.5, np.nan, 0.1, 0.1, np.nan, np.nan]),
        NAMES[1]: np.array([0.5, 0.7, 0.8, 0.8, 0.0, 0.0, 0.9, 0.9]),
        "oracle_consistency": np.ones(8),  # the second pair of rewards
        "oracle_between_images": np.ones(8),
    }
    items = np.repeat(range(4), 2)
    metrics = of_epoch(scores, items, [True, True, False, True])
    assert metrics == pytest.approx(
        {"reward/within": 0.65, "reward/between": 0.3, "reward/kappa": 0.5}
    )
    assert of_epoch(scores, items, [False] * 4) == {}
    assert of_epoch({NAMES[0]: np.ones(2)}, items[:2], [True]) == {}


def test_which_rewards_measure_it(tiny_flux_dir, tmp_path):
    oracle = ("oracle_consistency", "oracle_between_images")
    assert pairs_of(["pickscore", *oracle, *NAMES]) == [NAMES, oracle]
    assert pairs_of(["between_images"]) == []
    options = tiny_options(tiny_flux_dir, tmp_path)
    for count, message in ((3, "at least 4"), (4, "consistency_score")):
        with pytest.raises(ConfigError, match=message):
            measuring(options, count)


def test_evaluate_with_images_per_prompt(trained_run, tmp_path, capsys):
    """Two open prompts and one that describes everything; an adapter against the base model."""
    prompts = write_prompts(tmp_path / "prompts", test=3, first_open=2)
    adapter = str(trained_run.folder / "checkpoints/epoch_0002")
    with fake_judge.FakeJudge(fake_judge.by_content) as judge:
        kwargs = {"consistency_score": {"base_url": judge.url}}
        command = ["--config", str(trained_run.folder / "saved.yaml")]
        command += ["--output", str(tmp_path), "--images_per_prompt", "4"]
        command += ["--adapter", adapter, "--against", "base"]
        command += [
            f"--config.dataset={prompts}",
            "--config.test.reward_fn={'consistency_score': 1.0}",
            f"--config.test.reward_fn_kwargs={kwargs}",
        ]
        assert load_script("evaluate").main(command) == 0
    results = json.loads((tmp_path / "results.json").read_text())["agreement"]
    kappas = []
    for name, folder in ((adapter, tmp_path), ("base", tmp_path / "against")):
        images = read_rows(folder)
        assert len(images) == 12
        assert len({row["seed"] for row in images}) == 12
        scores = [[row["rewards"][reward] for reward in NAMES] for row in images if row["open"]]
        within, different = np.mean(scores, axis=0)
        between = 1 - different
        kappas.append(float(kappa(within, between)))
        measured = results[name]["all"]
        assert measured["kappa"]["prompts"] == 2
        assert measured["kappa"]["mean"] == pytest.approx(kappas[-1])
        assert measured["between"]["mean"] == pytest.approx(between)
    difference = results["difference"]["all"]["kappa"]["mean"]
    assert difference == pytest.approx(kappas[0] - kappas[1])
    assert difference != 0
    assert "κ" in capsys.readouterr().out
