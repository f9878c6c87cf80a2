"""Agreement beyond chance: κ against closed forms, its intervals, and scripts/evaluate.py --images_per_prompt."""

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
    return [
        {
            "item_id": item, "category": category, "open": is_open,
            "rewards": dict(zip(NAMES, (w, None if b is None else 1 - b), strict=True)),
        }
        for item, values in enumerate(zip(within, between, strict=True))
        for w, b in zip(*values, strict=True)
    ]  # fmt: skip


def test_kappa_of_known_generators():
    assert kappa(1.0, 0.25) == 1  # consistent images that differ
    assert kappa(0.9, 0.9) == 0 and kappa(0.3, 0.3) == pytest.approx(
        0
    )  # one fixed answer; no consistency at all
    assert kappa(0.2, 0.6) == pytest.approx(-1)
    assert np.isnan(kappa(1.0, 1.0))


def test_the_interval_of_kappa_is_over_prompts():
    rng = np.random.default_rng(5)
    w, b = rng.uniform(0.6, 1.0, (40, 4)), rng.uniform(0.1, 0.5, (40, 4))
    found = agreement(rows(w, b))["all"].kappa
    assert found.mean == pytest.approx((w.mean() - b.mean()) / (1 - b.mean()))
    # delete-one jackknife: another estimate of the same standard error
    left_out = [kappa(np.delete(w, i, 0).mean(), np.delete(b, i, 0).mean()) for i in range(40)]
    assert (found.high - found.low) / 2 == pytest.approx(
        1.96 * np.std(left_out) * np.sqrt(39), rel=0.1
    )


def test_prompts_that_describe_everything_have_w_only():
    several = rows([[0.9] * 4], [[0.5] * 4], category="A")
    full = [{**row, "item_id": 7} for row in rows([[0.5] * 4], [[0.0] * 4], False, category="B")]
    found = agreement(several + full)
    assert found["B"].within.mean == 0.5 and found["B"].between is None and found["B"].kappa is None
    assert found["A"].kappa.mean == pytest.approx(0.8) == found["all"].kappa.mean
    assert found["all"].within.mean == pytest.approx(0.7)
    assert list(found)[-1] == "all" and "| B | x | 0.5000 | – | – | 0 | 0 |" in table({"x": found})


def test_missing_answers_are_left_out_and_counted():
    found = agreement(
        rows([[1.0, None, 0.5, 0.5], [None] * 4], [[0.2, 0.2, None, 0.2], [0.1] * 4])
    )["all"]
    assert found.missing == 6 and found.within.mean == pytest.approx(2 / 3)
    assert found.kappa.prompts == 1 and found.kappa.mean == pytest.approx((2 / 3 - 0.2) / 0.8)


def test_a_difference_is_paired_by_prompt():
    w, b = np.array([[0.9] * 4, [0.7] * 4]), np.array([[0.5] * 4, [0.3] * 4])
    found = agreement(rows(w, b), rows(w - 0.1, b))["all"]
    assert found.within.mean == pytest.approx(0.1) == found.within.low
    assert found.between.mean == pytest.approx(0) and found.kappa.mean == pytest.approx(0.1 / 0.6)


def test_of_a_training_epoch():
    """Four prompts with two images each; the second lacks an answer, the third is not open, the last lacks all w."""
    within, between = (
        [0.9, 0.7, 0.5, np.nan, 0.1, 0.1, np.nan, np.nan],
        [0.5, 0.7, 0.8, 0.8, 0.0, 0.0, 0.9, 0.9],
    )
    monitored = {
        "oracle_consistency": np.ones(8),
        "oracle_between_images": np.ones(8),
    }  # not the first pair
    scores = {NAMES[0]: np.array(within), NAMES[1]: np.array(between)} | monitored
    items, values = np.repeat(range(4), 2), {"within": 0.65, "between": 0.3, "kappa": 0.5}
    found = of_epoch(scores, items, [True, True, False, True])
    assert found == pytest.approx({f"reward/{name}": value for name, value in values.items()})
    assert (
        of_epoch(scores, items, [False] * 4)
        == of_epoch({NAMES[0]: np.ones(2)}, items[:2], [True])
        == {}
    )


def test_which_rewards_measure_it(tiny_flux_dir, tmp_path):
    own = ("oracle_consistency", "oracle_between_images")
    assert (
        pairs_of(["pickscore", *own, *NAMES]) == [NAMES, own] and pairs_of(["between_images"]) == []
    )
    for count, named in ((3, "at least 4"), (4, "consistency_score")):
        with pytest.raises(ConfigError, match=named):
            measuring(tiny_options(tiny_flux_dir, tmp_path), count)


def test_evaluate_with_images_per_prompt(trained_run, tmp_path, capsys):
    """Two open prompts and one that describes everything; an adapter against the base model."""
    prompts, adapter = (
        write_prompts(tmp_path / "prompts", test=3, first_open=2),
        trained_run.folder / "checkpoints/epoch_0002",
    )
    with fake_judge.FakeJudge(fake_judge.by_content) as judge:
        command = [
            "--config", str(trained_run.folder / "saved.yaml"), "--output", str(tmp_path), "--images_per_prompt", "4",
            f"--config.dataset={prompts}", "--config.test.reward_fn={'consistency_score': 1.0}",
            f"--config.test.reward_fn_kwargs={{'consistency_score': {{'base_url': '{judge.url}'}}}}",
            "--adapter", str(adapter), "--against", "base",
        ]  # fmt: skip
        assert load_script("evaluate").main(command) == 0
    found, expected = json.loads((tmp_path / "results.json").read_text())["agreement"], []
    for name, folder in ((str(adapter), tmp_path), ("base", tmp_path / "against")):
        read, own = read_rows(folder), found[name]["all"]
        assert (
            len(read) == 12
            and len({row["seed"] for row in read}) == 12
            and own["kappa"]["prompts"] == 2
        )
        w, b = np.mean(
            [[r["rewards"][NAMES[0]], 1 - r["rewards"][NAMES[1]]] for r in read if r["open"]],
            axis=0,
        )
        expected.append(float(kappa(w, b)))
        assert own["kappa"]["mean"] == pytest.approx(expected[-1]) and own["between"][
            "mean"
        ] == pytest.approx(b)
    assert (
        found["difference"]["all"]["kappa"]["mean"] == pytest.approx(expected[0] - expected[1]) != 0
    )
    assert "κ" in capsys.readouterr().out
