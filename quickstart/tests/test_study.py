"""study.py: options of its runs, rows of results.csv, tables. No training."""

import pandas as pd
import pytest

import study
from paco_grpo.options import read_options
from paco_grpo.training.checks import contradictions

RUNS = [
    study.Run(name, run, 1)
    for name, runs in study.STUDIES.items()
    for run in runs.runs
    if run != "base"
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.study}-{run.name}")
def test_the_trainer_takes_the_options_of_every_run(run, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    config, *arguments = study.training_arguments(run, 10)
    options, _ = read_options(["--config", f"config/grpo.py:{config}", *arguments])
    assert contradictions(options) == []
    run_options = study.STUDIES[run.study].runs[run.name]
    assert options.num_epochs == run_options.get("num_epochs", 10)
    assert options.train.reward_fn == run_options["train.reward_fn"]
    judged = set(study.JUDGED) & set(options.train.reward_fn)
    assert set(options.train.reward_fn_kwargs) == judged


def rows_of(*rows):
    """Rows of results.csv from (run, judge, commit, seed, w − b)."""
    results = pd.DataFrame(rows, columns=["run", "judge", "commit", "seed", "oracle_w_minus_b"])
    return results.assign(study="rewards", oracle_b=0.25, consistency_after=float("nan"))


def test_errors_are_between_seeds_paired_and_of_one_judge():
    results = rows_of(
        ("variety", "j1", "c", 0, -1.0),  # an evaluation on the way
        ("variety", "j1", "c", 0, 0.1),
        ("variety", "j1", "d", 1, 0.3),
        ("gardo", "j1", "c", 0, 0.0),
        ("gardo", "j1", "c", 1, 0.1),
        ("variety", "j2", "c", 2, 0.9),
    )
    head, _, variety, gardo, other_judge = study.table(results).splitlines()
    assert head == "| run | judge | seeds | commits | diversity 1 − b | w − b |"
    assert variety == "| variety | j1 | 0 1 | c d | +0.750 ± 0.000 | +0.200 ± 0.100 |"
    assert gardo == "| gardo | j1 | 0 1 | c | +0.750 ± 0.000 | +0.050 ± 0.050 |"
    assert other_judge == "| variety | j2 | 2 | c | +0.750 | +0.900 |"
