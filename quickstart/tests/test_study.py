"""study.py: options of its runs, rows of results.csv, tables. No training."""

import json

import pandas as pd
import pytest

import study
from paco_grpo.commands.compare import results
from paco_grpo.options import read_options
from paco_grpo.rewards.registry import short_name
from paco_grpo.training.checks import contradictions
from paco_toy.summary import MEASURES

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


def test_the_results_of_an_evaluation_become_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    monkeypatch.setattr(study, "OUT", tmp_path)
    run = study.Run("rewards", "variety", 1)
    command = study.agreement_command(run)
    arguments = [word for word in command if word.startswith("--config.")]
    options, _ = read_options(["--config", command[3], *arguments])
    names = map(short_name, options.test.reward_fn)
    rewards = dict(zip(names, (0.5, 0.875, 0.75, 0.625), strict=True))  # judge, then oracle
    row = {"item_id": 0, "category": "c", "open": True, "rewards": rewards}
    evaluation = run.folder / "agreement"
    evaluation.mkdir(parents=True)
    (evaluation / "eval_data.jsonl").write_text(json.dumps(row) + "\n")
    results(evaluation, None, None)
    assert study.agreement_columns(run) == {
        "judge_w": 0.5,
        "judge_b": 0.125,
        "judge_w_minus_b": 0.375,
        "oracle_w": 0.75,
        "oracle_b": 0.375,
        "oracle_w_minus_b": 0.375,
    }


def test_warnings_are_read_from_the_log():
    log = [
        "started",
        "after epoch 3: x (train/grad_norm in metrics.jsonl)",
        "after epoch 4: y (1.0). Likely cause: z (reward/x in metrics.jsonl)",
        "after epoch 5: x (train/grad_norm in metrics.jsonl)",
    ]
    assert study.warnings_of("\n".join(log)) == "train/grad_norm@3 reward/x@4"


def test_the_finished_runs_can_be_read_and_extended(tmp_path, monkeypatch):
    known = study.read_results()
    assert not known.duplicated([*study.KEY, "epochs"]).any()
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results.csv")
    known.to_csv(study.RESULTS, index=False)
    before = dict.fromkeys(MEASURES, 0.1)
    after = dict.fromkeys(MEASURES, 0.2)
    policy = {"epochs": 2, "num_images": 4, "before": before, "after": after}
    study.keep(study.Run("rewards", "variety", 2), "abc", [study.before_and_after(policy)])
    extended = study.read_results()
    assert len(extended) == len(known) + 1
    columns = ["run", "judge", "agreement_before", "agreement_after"]
    assert extended.iloc[-1][columns].tolist() == ["variety", "abc", 0.1, 0.2]


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
