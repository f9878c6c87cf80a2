"""Rules over the rows of metrics.jsonl: limits on constructed numbers, and on two real runs.

metrics/ has numbers of two trainings of the quickstart's generator (NFT): ``good`` with
between_images as a factor (seed 1), ``collapsed`` with the judge's consistency alone (seed 22).
"""

from collections import defaultdict
from pathlib import Path

import pytest

from paco_grpo.monitoring.signs import (
    against_first,
    findings_of_run,
    judge_epoch,
    judge_evaluation,
    judge_scores,
)
from paco_judge.files import read_json_lines

METRICS = Path(__file__).with_name("metrics")
WELL = {
    "health/velocity_change": 0.05,
    "health/latent_std_vs_first": 0.9,
    "health/distinctness_vs_first": 0.8,
}


@pytest.mark.parametrize(
    ("sign", "bad", "good", "is_collapse"),
    [
        ("velocity_change", 0.9, 0.7, True),
        ("diversity_vs_first", 0.45, 0.55, False),
        ("latent_std_vs_first", 0.4, 0.6, True),
        ("latent_std_vs_first", 2.5, 1.9, True),
        ("distinctness_vs_first", 0.1, 0.3, True),
        # They compare false with every limit.
        ("latent_std", float("inf"), 0.6, True),
    ],
)
def test_limits_of_an_epoch(sign, bad, good, is_collapse):
    (finding,) = judge_epoch(WELL | {f"health/{sign}": bad})
    assert (finding.sign, finding.collapse) == (f"health/{sign}", is_collapse)
    assert judge_epoch(WELL | {f"health/{sign}": good}) == []


def evaluation(stderr, **means):
    row = {}
    for name, value in means.items():
        row |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": stderr}
    return row


def test_trained_rewards_against_evaluation_only_ones():
    first = evaluation(0.03, judge=0.4, oracle=0.0)
    hacked = evaluation(0.04, judge=0.8, oracle=-0.3)
    good = evaluation(0.04, judge=0.8, oracle=0.2)
    half_way = evaluation(0.05, judge=0.6, oracle=-0.15)  # nor does the last step say enough
    slight = evaluation(0.04, judge=0.5, oracle=-0.3)  # two standard errors of a rise
    assert judge_evaluation([half_way, hacked], ["judge"]) == []
    assert judge_evaluation([first, slight], ["judge"]) == []
    for rows in ([first, hacked], [first, half_way, hacked]):
        (finding,) = judge_evaluation(rows, ["judge"])
        assert finding.sign == "eval/oracle_mean"
        assert "6.0" in finding.message  # standard errors of both evaluations
    assert judge_evaluation([first, good], ["judge"]) == []
    assert judge_evaluation([first, hacked], ["judge", "oracle"]) == []
    assert judge_evaluation([first], ["judge"]) == []


def test_diversity_is_of_the_epochs_that_have_open_prompts():
    """The ratios of a run: test_whole_run.py."""
    values = (0.2, 0.6, 0.3, 0.8)
    rows = [{"reward/between": value} for value in values]
    rows.insert(1, {})
    ratio = (0.4 + 0.7 + 0.2) / (0.8 + 0.4 + 0.7)
    assert against_first(rows) == {"health/diversity_vs_first": pytest.approx(ratio)}
    assert against_first(rows[:4]) == {}  # three with open prompts
    assert against_first([{"reward/between": 1.0}] * 5) == {}


def test_equal_scores_are_named_once():
    flat = {"advantage/mean_abs": 0.0, "advantage/dropped_share": 0.5, "reward/ocr_mean": 0.0}
    good = flat | {"advantage/mean_abs": 0.7}
    missing = flat | {"advantage/dropped_share": 1.0}
    (finding,) = judge_scores([good, missing, flat])
    assert "ocr 0.0000" in finding.message and not finding.collapse
    for rows in ([flat, flat], [flat, good], [missing], [{}]):
        assert judge_scores(rows) == []


def run_of(name):
    return read_json_lines(METRICS / f"{name}.jsonl")


def signs_of(rows):
    """Sign → the epochs that it warned in."""
    epochs = defaultdict(list)
    for epoch, finding in findings_of_run(rows, {"eval/": ["consistency_score"]}):
        epochs[finding.sign].append(epoch)
    return dict(epochs)


def test_real_runs():
    assert signs_of(run_of("good")) == {}
    assert signs_of(run_of("collapsed")) == {"health/diversity_vs_first": list(range(6, 13))}


def test_findings_are_in_the_order_of_their_epochs():
    rows = run_of("collapsed")
    (evaluated,) = [row for row in rows if (row["phase"], row["epoch"]) == ("eval", 7)]
    evaluated["eval/oracle_alignment_mean"] = 0.4
    findings = findings_of_run(rows, {"eval/": ["consistency_score"]})
    assert [epoch for epoch, _ in findings] == [6, 7, 7, *range(8, 13)]


@pytest.mark.parametrize(
    ("key", "odd"),
    [("health/distinctness", 0.004), ("reward/between", 0.75), ("health/latent_std", 2.6)],
)
def test_one_odd_epoch_is_no_sign(key, odd):
    """Of a good run; its prompts may all be alike. Three such epochs are one."""
    rows = run_of("good")
    epochs = [row for row in rows if row["phase"] == "train"]
    epochs[8][key] = odd
    assert signs_of(rows) == {}
    for row in epochs[9:11]:
        row[key] = odd
    (warned,) = signs_of(rows).values()
    assert 11 in warned and min(warned) > 9


def test_a_generator_that_breaks_in_the_second_epoch():
    """Its first three epochs are no measure of the spread of latents."""
    rows = run_of("good")
    for row in rows:
        if row["phase"] == "train" and row["epoch"] > 1:
            row["health/latent_std"] *= 4
    assert signs_of(rows) == {"health/latent_std_vs_first": list(range(2, 17))}


def test_numbers_that_are_not_finite_are_named_in_their_row():
    rows = run_of("good")
    del rows[6]["health/latent_std"]
    rows[6]["not_finite"] = ["health/latent_std"]
    assert signs_of(rows) == {"health/latent_std": [rows[6]["epoch"]]}


def test_an_older_run_is_judged_by_the_rules_of_today():
    """It compared single epochs."""
    rows = run_of("good")
    for row in rows:
        if row["phase"] == "train":
            row["health/distinctness_vs_first"] = 0.2
    assert signs_of(rows) == {}
