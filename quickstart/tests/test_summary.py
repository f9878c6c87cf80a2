"""summary.json's numbers, and the tables of study.py."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

import study
from paco_grpo.evaluation.agreement import agreement, pairs_of
from paco_grpo.options import read_options
from paco_grpo.rewards.registry import short_name
from paco_grpo.training.checks import contradictions
from paco_toy.summary import MEASURES, policy_measures, table
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    grid_prompt,
    opened,
    render_grid,
    to_image,
    write_jsonl,
)


def evaluation(run, epoch, rewards, characters=None, named=None):
    """An evaluation, of drawn images or of edits."""
    (run / "config.yaml").write_text("train: {resolution: 64}\ntest: {resolution: 128}\n")
    folder = run / "eval" / f"epoch_{epoch:04d}"
    folder.mkdir(parents=True)
    rows = [{"prompt": "p", "rewards": each, "file": f"{i}.png"} for i, each in enumerate(rewards)]
    for row, panels, character in zip(rows, characters or (), named or ()):
        to_image(render_grid([CHARACTERS[c] for c in panels], VIEWS[:4], 32)).save(
            folder / row["file"]
        )
        row["prompt"] = grid_prompt(character, VIEWS[:4])
    write_jsonl(folder / "eval_data.jsonl", rows)


def test_measures_are_of_the_prompts_that_they_apply_to(tmp_path):
    named = [
        CHARACTERS[0],
        CHARACTERS[0],
        opened(CHARACTERS[0], ("style", "colour")),
        opened(CHARACTERS[5], ("colour",)),
    ]
    shown = {
        0: [[0, 0, 1, 1], [0, 1, 2, 3], [0, 5, 10, 15], [5, 5, 0, 0]],
        2: [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 10, 10], [10, 10, 10, 10]],
    }
    for epoch, characters in shown.items():
        evaluation(
            tmp_path, epoch, [{"consistency_score": 0.4 + epoch / 10}] * 4, characters, named
        )
    found = policy_measures(tmp_path)
    assert found["before"]["consistency"] == pytest.approx(1 / 6) and found["after"][
        "consistency"
    ] == pytest.approx(3 / 4)
    agreement = {when: found[when]["agreement"] for when in ("before", "after")}
    assert agreement == pytest.approx({"before": (0 + 2 / 6) / 2, "after": (2 / 6 + 1) / 2})
    differences = np.array([2 / 6, 4 / 6])
    assert found["change"]["agreement"] == pytest.approx(
        {"mean": differences.mean(), "stderr": differences.std(ddof=1) / 2**0.5}
    )
    assert found["change"]["choice"]["stderr"] > 0 and found["change"]["reward"][
        "mean"
    ] == pytest.approx(0.2)
    assert (
        found["epochs"],
        found["num_images"],
        found["train_resolution"],
        found["test_resolution"],
    ) == (2, 4, 64, 128)

    (tmp_path / "eval").rename(tmp_path / "other")
    for epoch, characters in shown.items():
        evaluation(tmp_path, epoch, [{"jpeg_compressibility": -1.0}] * 4, characters, named)
    assert "reward" not in policy_measures(tmp_path)["change"]


def test_the_change_of_edits_is_paired(tmp_path):
    before, after = [0.0, 0.0, 1.0, 0.5], [1.0, 0.0, 1.0, 1.0]
    for epoch, scores in ((0, before), (7, [0.0] * 4), (12, after)):
        evaluation(
            tmp_path,
            epoch,
            [{"oracle_edit": s, "oracle_followed": s, "oracle_kept": 1.0} for s in scores],
        )
    found = policy_measures(tmp_path)
    assert (found["before"]["oracle_edit"], found["after"]["oracle_edit"], found["epochs"]) == (
        0.375,
        0.75,
        12,
    )
    stderr = np.subtract(after, before).std(ddof=1) / 2
    assert found["change"]["oracle_edit"] == pytest.approx({"mean": 0.375, "stderr": stderr})
    assert "+0.375 ±0.239" in table({"policy": found, "minutes": 8})


@pytest.mark.parametrize(
    ("name", "run"),
    [(study_, run) for study_, runs in study.STUDIES.items() for run in runs if run != "base"],
)
def test_the_trainer_takes_the_options_of_every_run(name, run, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    config, *arguments = study.arguments_of(name, run, 1, 10)
    options, _ = read_options(["--config", f"config/grpo.py:{config}", *arguments])
    assert contradictions(options) == []
    own = study.STUDIES[name][run]
    assert (
        options.num_epochs == own.get("num_epochs", 10)
        and options.train.reward_fn == own["train.reward_fn"]
    )
    assert set(options.train.reward_fn_kwargs) == set(study.JUDGED) & set(options.train.reward_fn)


@pytest.mark.parametrize("other", [False, True])
def test_the_evaluation_takes_its_options_and_its_results_become_columns(
    other, tmp_path, monkeypatch
):
    monkeypatch.chdir(study.GRPO)
    command = study.agreement_command(
        tmp_path, 1, {"model": "Other", "question": "pair"} if other else {}
    )
    options, _ = read_options(
        ["--config", command[3], *(word for word in command if word.startswith("--config."))]
    )
    pairs = pairs_of(map(short_name, options.test.reward_fn))
    assert {within for within, _ in pairs} == set(list(study.JUDGES.values())[: 3 if other else 2])
    rewards = {name: 0.75 for pair in pairs for name in pair}
    row = {"item_id": 0, "category": "c", "open": True, "rewards": rewards}
    found = {name: dataclasses.asdict(each) for name, each in agreement([row]).items()}
    (tmp_path / "agreement").mkdir()
    (tmp_path / "agreement" / "results.json").write_text(json.dumps({"agreement": {"base": found}}))
    columns = study.agreement_columns(tmp_path)
    assert (
        columns["judge_w"] == 0.75
        and columns["oracle_b"] == 0.25
        and columns["oracle_kappa"] == pytest.approx(2 / 3)
    )
    assert ("other_kappa" in columns) == other


def test_health_signals_are_read_from_the_log():
    lines = [
        "after epoch 3: x (train/grad_norm in metrics.jsonl)",
        "after epoch 4: y (1.0). Likely cause: z (reward/kappa in metrics.jsonl)",
    ]
    assert (
        study.warnings_of("\n".join(["started", *lines, lines[0].replace("3", "5")]))
        == "train/grad_norm@3 reward/kappa@4"
    )


def results(*rows):
    names = ("run", "judge", "commit", "seed", "oracle_kappa")
    return pd.DataFrame([{"oracle_b": 0.25} | dict(zip(names, row, strict=True)) for row in rows])


def test_errors_are_between_seeds_paired_and_of_one_judge():
    found = results(("variety", "j1", "c", 0, 0.1), ("variety", "j1", "d", 1, 0.3), ("gardo", "j1", "c", 0, 0.0), ("gardo", "j1", "c", 1, 0.1),
                    ("variety", "j2", "c", 2, 0.9))  # fmt: skip
    lines = study.table(found).splitlines()
    assert len(lines) == 5
    assert (
        "| variety | j1 | 0 1 | c d |" in lines[2]
        and "+0.200 ± 0.100" in lines[2]
        and "+0.750" in lines[2]
    )
    assert "+0.900 |" in lines[4] and "±" not in lines[4].split("+0.900")[1].split("|")[0]
    (difference,) = study.table(found, "variety").splitlines()[2:]
    assert "variety − gardo | j1 | 0 1" in difference and "+0.150 ± 0.050" in difference


def test_the_finished_runs_can_be_read_and_extended(tmp_path, monkeypatch):
    known = study.read_results()
    assert known[["commit", "judge"]].notna().all().all()
    assert not known.duplicated(["study", "run", "seed", "commit", "judge", "epochs"]).any()
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results.csv")
    known.to_csv(study.RESULTS, index=False)
    policy = {
        "epochs": 2,
        "num_images": 4,
        "before": dict.fromkeys(MEASURES, 0.1),
        "after": dict.fromkeys(MEASURES, 0.2),
    }
    study.keep(study.row_of("rewards", "variety", 2, "abc", policy, {"oracle_kappa": 0.5}))
    last = study.read_results().iloc[-1]
    assert len(study.read_results()) == len(known) + 1
    assert last["judge"] == "abc" and last["agreement_after"] == 0.2 and last["oracle_kappa"] == 0.5
