"""Problems of a training configuration and its data are reported before anything is loaded."""

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from packaging.requirements import Requirement

from paco_judge.errors import UserError
from paco_reward import launch, overlay
from paco_reward.config import check_combinations, check_options, load_config
from paco_reward.datasets import check_data
from paco_reward.launch import next_commands, plan_processes, run

ROOT = Path(__file__).parent.parent
MINIMAL = {"model_name_or_path": "model", "output_dir": "out"}


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Our options are known to LLaMA-Factory."""
    overlay.install()


@pytest.fixture
def data(data_dir, tmp_path):
    """A copy of the data sets that a test may break."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


@pytest.fixture
def config(data):
    return {"dataset_dir": str(data), "dataset": "pairs"}


def problem(config) -> str:
    with pytest.raises(UserError) as caught:
        check_data(config)
    return str(caught.value)


def change_row(data: Path, number: int, **values) -> None:
    """Change a row of the data set `pairs`."""
    rows = json.loads((data / "pairs.json").read_text())
    rows[number] |= values
    (data / "pairs.json").write_text(json.dumps(rows))


QUESTION = {"role": "user", "content": "<image><image>Same?"}


@pytest.mark.parametrize(
    ("number", "change", "named"),
    [
        (2, {"images": ["nowhere.png"] * 2}, "nowhere.png"),
        (1, {"messages": [QUESTION]}, "assistant"),
        (3, {"messages": [QUESTION, {"role": "assistant"}]}, "content"),
        (
            4,
            {"messages": [QUESTION, {"role": "assistant", "content": "Yes. <|image_pad|>"}]},
            "<|image_pad|>",
        ),
        (5, {"images": ["images/pairs_0_a.png"]}, "1 images"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(config, data, number, change, named):
    change_row(data, number, **change)
    message = problem(config)
    assert f"pairs row {number}" in message and named in message


def test_problems_of_a_data_set_are_named(config, data, tmp_path):
    assert "held_out, pairs" in problem(config | {"dataset": "pair"})
    message = problem(config | {"dataset_dir": "PaCo-Dataset"})
    assert "hf download X-GenGroup/PaCo-Dataset" in message
    assert "bash decompress.sh" in message
    (data / "pairs.json").write_text("{broken")
    assert "pairs.json" in problem(config)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("decompress.sh", "cd {data} && bash decompress.sh"),
        ("images/part_1.zip", "such as part_1.zip"),
        ("images.tar.gz.part_aa", "such as images.tar.gz.part_aa"),
        ("notes.txt", ""),
    ],
)
def test_packed_images_are_named_with_what_unpacks_them(config, data, file, remedy):
    shutil.rmtree(data / "images")
    (data / file).parent.mkdir(exist_ok=True)
    (data / file).touch()
    message = problem(config)
    assert "images do not exist" in message and remedy.format(data=data) in message
    assert bool(remedy) == ("unpack" in message)


@pytest.mark.parametrize("answer", ["Maybe.", "Not sure", "Yesterday", "yes"])
def test_other_labels_are_announced(config, data, caplog, answer):
    change_row(data, 3, messages=[QUESTION, {"role": "assistant", "content": answer}])
    info = json.loads((data / "dataset_info.json").read_text())
    others = {"hub": {"hf_hub_url": "some/set"}, "alpaca": info["pairs"] | {"formatting": "alpaca"}}
    (data / "dataset_info.json").write_text(json.dumps(info | others))
    # Two of them are left to LLaMA-Factory.
    check_data(config | {"dataset": "pairs, hub, alpaca", "eval_dataset": ["held_out"]})
    (warning,) = caplog.messages
    assert "1 answers" in warning and "row 3" in warning and repr(answer) in warning


def test_every_configuration_file_can_be_trained_with():
    files = list((ROOT / "config").glob("*.yaml"))
    assert len(files) == 6
    for file in files:
        values = load_config(file)
        assert values["first_token_weight"] == 0.1, file
        check_options(values)
        check_combinations(values)


def test_a_file_with_a_base_has_its_values_unless_it_replaces_them(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("lora_rank: 4\nlearning_rate: 1\ncutoff_len: 9\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nlora_rank: 8\n")
    (tmp_path / "sub" / "c.yaml").write_text("base: ../b.yaml\ncutoff_len: null\n")
    config = load_config(tmp_path / "sub" / "c.yaml", ["learning_rate=2e-5"])
    assert config == {"lora_rank": 8, "learning_rate": 2e-5, "cutoff_len": None}
    with pytest.raises(UserError, match="'lr'"):
        load_config(tmp_path / "a.yaml", ["lr"])
    (tmp_path / "wrong.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"wrong\.yaml"):
        load_config(tmp_path / "wrong.yaml")


@pytest.mark.parametrize(
    "change",
    [
        {"model_name_or_path": None},
        {"output_dir": ""},
        {"learning_rte": 1e-4},
        {"first_token_wieght": 0.1},
        {"save_strategy": "sometimes"},
        {"finetuning_type": "lorra"},
        {"first_token_weight": "0.1"},
        {"first_token_weight": True},
        {"first_token_weight": float("nan")},
        {"first_token_weight": 1.5},
        {"first_token_scheme": "mean"},
        {"first_token_accuracy": "yes"},
        {"global_batch_size": 6.5},
        {"per_device_train_batch_size": "8"},
        {"gradient_accumulation_steps": -1},
        {"dataset": 3},
        {"eval_dataset": [3]},
        {"use_cpu": "true"},
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(change, tmp_path):
    """In the parent: neither model nor data exist."""
    check_options(MINIMAL)
    (name,) = change
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(MINIMAL | {"dataset_dir": "nowhere", "dataset": "none"} | change))
    named = {"save_strategy": "sometimes", "finetuning_type": "fine-tuning"}.get(name, name)
    with pytest.raises(UserError, match=named):
        run(str(file), [], {"NPROC_PER_NODE": "2"})


def test_checking_options_starts_no_distributed_processes(monkeypatch):
    """A cluster's variables are for the processes that train: here nobody would answer."""
    PartialState._reset_state()
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    check_options(MINIMAL)
    assert PartialState._shared_state == {}


def test_a_model_that_is_not_there_is_a_message(config, tmp_path):
    file = tmp_path / "train.yaml"
    name = "some-organization/some-model"
    file.write_text(json.dumps(MINIMAL | config | {"model_name_or_path": name}))
    with pytest.raises(UserError, match=name):
        run(str(file), [], {})


def arguments_of(config, **environment):
    return plan_processes(config, environment)


def test_processes_are_as_many_as_gpus_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert arguments_of({}) == ["--nnodes=1", "--nproc_per_node=8", "--standalone"]
    assert arguments_of({"use_cpu": True}) == ["--nnodes=1", "--nproc_per_node=2", "--standalone"]
    assert arguments_of({"use_cpu": True}, NPROC_PER_NODE="4")[1] == "--nproc_per_node=4"
    assert arguments_of({}, NPROC_PER_NODE="1") is None
    assert arguments_of({"deepspeed": "zero3.json"}, NPROC_PER_NODE="1")[1] == "--nproc_per_node=1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arguments_of({}) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arguments_of({})[1] == "--nproc_per_node=2"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert arguments_of({}) is None


def test_nodes_find_each_other_by_the_usual_variables():
    two = {"NNODES": "2", "NPROC_PER_NODE": "4"}
    assert arguments_of({}, **two, NODE_RANK="1", MASTER_ADDR="node0", MASTER_PORT="1234") == [
        "--nnodes=2",
        "--nproc_per_node=4",
        "--node_rank=1",
        "--master_addr=node0",
        "--master_port=1234",
    ]
    defaults = ["--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29500"]
    assert arguments_of({}, **two)[2:] == defaults
    assert arguments_of({}, NPROC_PER_NODE="4", MASTER_PORT="7")[-1] == "--master_port=7"
    with pytest.raises(UserError, match="NNODES"):
        arguments_of({}, NNODES="two")


def test_only_the_first_node_writes_into_the_output_folder(
    config, judge_dir, tmp_path, monkeypatch, capsys
):
    """Each node trains with the options that it was given."""
    trained = {}

    def processes(arguments):
        file = Path(arguments[-1])
        trained[file.parent == output] = load_config(file)
        return 0

    monkeypatch.setattr(launch, "run_processes", processes)
    output = tmp_path / "out"
    file = tmp_path / "given.yaml"
    options = {"model_name_or_path": str(judge_dir), "output_dir": str(output), "do_train": True}
    file.write_text(json.dumps(config | options))
    two = {"NNODES": "2", "NPROC_PER_NODE": "1"}
    assert run(str(file), [], two | {"NODE_RANK": "1"}) == 0
    assert not output.exists() and str(output) not in capsys.readouterr().out
    assert run(str(file), [], two | {"NODE_RANK": "0"}) == 0
    assert (output / "train.yaml").is_file()
    assert trained[True] == trained[False] and trained[True]["template"] == "qwen2_vl"
    assert f"saved in {output}" in capsys.readouterr().out


def test_a_finished_training_names_the_next_commands():
    config = MINIMAL | {"dataset_dir": "data", "eval_dataset": ["a_test", "b_test"]}
    shown = next_commands(config)
    measure = "accuracy --model model --adapter out --dataset_dir data --dataset 'a_test,b_test'"
    assert measure in shown and "export --base model --adapter out" in shown
    shown = next_commands(config | {"finetuning_type": "full"})
    assert "accuracy --model out --dataset_dir" in shown and "export" not in shown


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "dpo"},
        {"use_dft_loss": True},
        {"use_mca": True},
        {"train_on_prompt": True},
        {"enable_thinking": True},
        {"packing": True},
        {"average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
    ],
)
def test_combinations_that_make_the_loss_wrong_are_refused(change):
    check_combinations(change | {"first_token_weight": None})
    (name,) = change
    with pytest.raises(UserError, match=name):
        check_combinations(change | {"first_token_weight": 0.1})
    packed = {"first_token_weight": 0.1, "packing": True, "neat_packing": True}
    check_combinations(packed)
    with pytest.raises(UserError, match="packing"):
        check_combinations(packed | {"template": "qwen3_5"})


def test_both_subprojects_allow_the_same_torch():
    """One environment may hold both; without our pins, the newest allowed release is installed."""
    reward = tomllib.loads((ROOT / "LLaMA-Factory/pyproject.toml").read_text())["project"]
    grpo = tomllib.loads((ROOT.parent / "PaCo-GRPO/pyproject.toml").read_text())["project"]
    setup = (ROOT / "LLaMA-Factory/setup.py").read_text()
    allowed = {}
    for line in grpo["dependencies"]:
        requirement = Requirement(line.replace("{root:parent:uri}", "file:///clone"))
        allowed[requirement.name] = requirement
    for line in reward["optional-dependencies"]["torch"]:
        requirement = Requirement(line)
        assert requirement == allowed[requirement.name]
        assert f'"{line}"' in setup
    assert not allowed["torch"].specifier.contains("2.15.0")
    assert not allowed["transformers"].specifier.contains("5.6.0")
