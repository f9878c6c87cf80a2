"""study.py: options of its runs, rows of results.csv, tables. No training."""

import json
from importlib.metadata import version

import pandas as pd
import pytest
from PIL import Image

import study
import study_tables
from paco_grpo.commands.evaluate import results
from paco_grpo.options import read_options
from paco_grpo.rewards.registry import short_name
from paco_grpo.training.checks import contradictions
from paco_judge.files import read_json_lines, write_json
from paco_toy.darkness import darkness

KEY = {"study": "rewards", "run": "variety", "seed": 2, "commit": "c7f64444", "judge": "abc"}
KEY |= {"torch": "2.7"}
RUNS = [(name, run) for name, runs in study.STUDIES.items() for run in runs]


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_the_trainer_takes_the_options_of_every_run(name, run, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    monkeypatch.setenv("VLLM_PORT", "8123")
    key = KEY | {"study": name, "run": run, "seed": 3}
    config, *arguments = study.training_arguments(key)
    options, _ = read_options(["--config", f"config/grpo.py:{config}", *arguments])
    assert contradictions(options) == []
    _, changes = study.STUDIES[name][run]
    assert {f"--config.{key}={value}" for key, value in changes.items()} <= set(arguments)
    assert (options.seed, options.test.seed) == (3, 1003)
    kwargs = options.train.reward_fn_kwargs
    ports = {kwargs[reward]["port"] for reward in study.JUDGED if reward in kwargs}
    assert ports == (set() if name == "aggregation" else {8123})
    folder = study.GRPO / options.save_dir / options.run_name
    assert folder.resolve() == study.folder_of(key)


def test_the_results_of_a_run_become_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(study.GRPO)
    checkpoint = tmp_path / "checkpoints" / "epoch_0002"
    arguments = study.agreement_arguments(checkpoint, 1)
    options, _ = read_options([word for word in arguments if word.startswith("--config")])
    names = map(short_name, options.test.reward_fn)
    rewards = dict(zip(names, (0.75, 0.625), strict=True))
    row = {"item_id": 0, "category": "c", "open": True, "rewards": rewards}
    evaluation = tmp_path / "agreement" / "epoch_0002"
    assert arguments[-2:] == [f"--adapter={checkpoint}", f"--output={evaluation}"]
    evaluation.mkdir(parents=True)
    (evaluation / "eval_data.jsonl").write_text(json.dumps(row) + "\n")
    results(evaluation, None, None)
    agreement = study.agreement_of(checkpoint)
    assert agreement == {"oracle_w": 0.75, "oracle_b": 0.375, "oracle_w_minus_b": 0.375}

    known = study_tables.read_results()
    assert not known.duplicated([*study.KEY, "epochs"]).any()
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path / "results.csv")
    known.to_csv(study_tables.RESULTS, index=False)
    study_tables.add_results(KEY, [{"epochs": 0}, {"epochs": 2} | agreement])
    extended = study_tables.read_results()
    assert len(extended) == len(known) + 2
    last = study_tables.trained(extended).iloc[-1]
    assert last[list(KEY)].to_dict() == KEY
    assert last["epochs"] == 2
    assert last["diversity"] == 0.625


def test_a_run_is_of_the_judge_and_the_commit_that_it_was_trained_with(tmp_path, monkeypatch):
    """Of another judge, commit or torch, it is neither continued nor taken as finished."""
    judge = tmp_path / "judge"
    judge.mkdir()
    weights = judge / "model.safetensors"
    judges = []
    for text in "12":
        weights.write_text(text)
        judges.append(study.judge_id(judge))
    trained = []

    def train(key):
        weights.write_text("of a quickstart that ends meanwhile")
        trained.append(key)
        return [{"epochs": 4}]

    def study_with(judge_weights, commit):
        weights.write_text(judge_weights)
        monkeypatch.setattr(study, "commit", lambda: commit)
        study.train_missing(["rewards"], ["kl_0.1", "variety"], [5], judge)

    monkeypatch.setattr(study_tables, "RESULTS", tmp_path / "results.csv")
    monkeypatch.setattr(study, "WORLD", tmp_path / "world")
    pd.DataFrame([KEY]).to_csv(study_tables.RESULTS, index=False)
    monkeypatch.setattr(study.subprocess, "run", lambda *command, **options: None)
    monkeypatch.setattr(study, "train", train)
    for judge_weights, commit in [("1", "c"), ("1", "c"), ("2", "c"), ("1", "d+1f")]:
        study_with(judge_weights, commit)
    keys = [(key["run"], key["judge"], key["commit"]) for key in trained]
    first, second = judges
    expected = [(first, "c"), (second, "c"), (first, "d+1f")]
    assert keys == [(run, *of) for of in expected for run in ("variety", "kl_0.1")]
    monkeypatch.setattr(study, "version", lambda package: "2.99")
    study_with("2", "c")
    assert [key["torch"] for key in trained] == [version("torch")] * 6 + ["2.99"] * 2
    assert len({study.folder_of(key) for key in trained}) == len(trained)
    rows = study_tables.read_results()[list(KEY)].to_dict("records")
    assert rows == [KEY, *trained]
    with pytest.raises(SystemExit, match="git"):
        study_with("1", "unknown")
    first_row = read_json_lines(tmp_path / "world" / "open_prompts" / "test_metadata.jsonl")[0]
    assert first_row["open"]


def test_a_student_comes_after_a_teacher_of_another_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path / "results.csv")
    key = KEY | {"study": "methods", "run": "opd"}
    pd.DataFrame([key | {"run": "dpo"}]).to_csv(study_tables.RESULTS, index=False)
    monkeypatch.setattr(study, "OUT", tmp_path)
    trained = []

    def train(key):
        trained.append(key)
        study.folder_of(key).mkdir()
        return [{"epochs": 4}]

    monkeypatch.setattr(study, "train", train)
    study.finish(key)
    study.finish(key)
    teacher = key | {"run": "nft", "seed": 3}
    assert trained == [teacher, key]
    # Its rows may come from another machine.
    rows = study_tables.read_results()
    rows[rows["run"] != "opd"].to_csv(study_tables.RESULTS, index=False)
    for folder in (study.folder_of(teacher), study.folder_of(key)):
        folder.rmdir()
    study.finish(key)
    assert trained == [teacher, key, teacher, key]
    assert len(study_tables.read_results()) == len(rows)
    checkpoint = study.folder_of(teacher) / "checkpoints" / "epoch_0016"
    assert f"--config.train.opd_teachers={{'nft': '{checkpoint}'}}" in study.training_arguments(key)


def test_each_checkpoint_of_a_method_has_w_minus_b_and_its_teraflops(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "OUT", tmp_path)
    key = KEY | {"study": "methods", "run": "crd"}
    folder = study.folder_of(key)
    for epochs in (4, 12):
        (folder / "checkpoints" / f"epoch_{epochs:04d}").mkdir(parents=True)
        measured = {name: {"mean": epochs / 16} for name in ("within", "between")}
        measured["within_minus_between"] = {"mean": epochs / 20}
        oracle = {f"oracle_{name}": of for name, of in measured.items()}
        output = study.agreement_folder(folder / "checkpoints" / f"epoch_{epochs:04d}")
        output.mkdir(parents=True)
        write_json(output / "results.json", {"results": {"adapter": oracle}})
    commands = []
    monkeypatch.setattr(study.subprocess, "run", lambda words, **_: commands.append(words))
    evaluations = {"epoch_0000": {"epochs": 0}, "epoch_0012": {"epochs": 12, "images": 3}}
    monkeypatch.setattr(study, "evaluations_of", lambda folder: evaluations)
    monkeypatch.setattr(study, "teraflops_of_epoch", lambda key: 1.5)
    rows = pd.DataFrame(study.train(key)).assign(**key)
    assert rows["epochs"].tolist() == [0, 4, 12]
    assert rows["teraflops"].tolist() == [0, 6, 18]
    assert rows["oracle_w_minus_b"].tolist()[1:] == [0.2, 0.6]
    assert len(commands) == 3  # the training, two evaluations
    other = rows.iloc[:2].assign(seed=5)
    first, second = study_tables.tables(pd.concat([rows, other]), "methods").split("\n\n")
    assert first.splitlines()[-1].endswith(" 18.0, nan")
    of_epochs = [line.split()[-10:] for line in second.splitlines()[2:]]
    shown = [(words[0], float(words[4]), float(words[7])) for words in of_epochs]
    assert shown == [("4", 0.75, 0.2), ("12", 0.25, 0.6)]


def test_teraflops_are_the_transformers_in_an_epoch():
    """As results.csv has it for the quickstart's training, from another count."""
    key = KEY | {"study": "methods", "run": "nft"}
    assert study.teraflops_of_epoch(key) == pytest.approx(18.5126 / 16, rel=1e-4)


def test_darkness_is_the_percentage_of_dark_pixels():
    image = Image.new("RGB", (8, 4), "gray")
    image.paste("black", (0, 0, 2, 4))
    assert darkness()([image, Image.new("RGB", (2, 2))], [None, None]).tolist() == [25, 100]
