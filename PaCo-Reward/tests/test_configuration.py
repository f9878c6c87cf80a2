"""Problems of a training configuration and its data are reported before anything is loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from paco_judge.errors import UserError
from paco_reward import overlay
from paco_reward.config import check_combinations, check_options, load_config
from paco_reward.datasets import check_data
from paco_reward.launch import plan_processes, run, train

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


QUESTION = {"role": "user", "content": "<image><image>Same?"}
ANSWER = {"role": "assistant", "content": "Yes."}


def problem(config, row: dict | None = None) -> str:
    """The error for the data set `pairs` with these values in its third row."""
    file = Path(config["dataset_dir"], "pairs.json")
    rows = json.loads(file.read_text())
    rows[2] |= row or {}
    file.write_text(json.dumps(rows))
    with pytest.raises(UserError) as caught:
        check_data(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"images": ["nowhere.png"] * 2}, "nowhere.png"),
        ({"messages": [QUESTION]}, "assistant"),
        ({"messages": [QUESTION, ANSWER, ANSWER, QUESTION]}, "in turn"),
        ({"messages": [{"from": "human", "value": "<image><image>Same?"}]}, "'content'"),
        ({"messages": [QUESTION | {"content": "Yes. <|video_pad|>"}]}, "<|video_pad|>"),
        ({"messages": [QUESTION, ANSWER | {"content": "Yes, <image>."}]}, "3 times <image>"),
        ({"images": ["images/pairs_0_a.png"]}, "1 images"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(config, row, named):
    message = problem(config, row)
    assert "pairs row 2" in message and named in message


def test_rows_are_read_as_llama_factory_reads_them(config, caplog):
    """JSON lines whatever the suffix, system prompts in both places, texts without images, and
    images in two turns.
    """
    file = Path(config["dataset_dir"], "pairs.json")
    index = file.with_name("dataset_info.json")
    info = json.loads(index.read_text())
    info["pairs"]["columns"]["system"] = "rule"
    info["pairs"]["tags"]["system_tag"] = "system"
    index.write_text(json.dumps(info))
    rows = json.loads(file.read_text())
    rows[1]["rule"] = "Be strict."
    rows[3]["messages"].insert(0, {"role": "system", "content": "Be kind."})
    rows[4] = {"messages": [QUESTION | {"content": "Who?"}, ANSWER]}
    turns = [QUESTION | {"content": f"{number} is <image>?"} for number in ("One", "Two")]
    rows[5]["messages"] = [turns[0], ANSWER, turns[1], ANSWER]
    file.write_text("\n".join(map(json.dumps, rows)))
    check_data(config | {"max_samples": 16})
    (warning,) = caplog.messages
    assert warning.startswith("2 of 16 rows") and "pairs row 1: 'Be strict.'" in warning
    check_data(config | {"max_samples": 15})
    assert "max_samples" in caplog.messages[-1]


def test_problems_of_a_data_set_are_named(config, tmp_path):
    assert "held_out, pairs" in problem(config | {"dataset": "pair"})
    with pytest.raises(UserError, match=r"hf download X-GenGroup/PaCo-Dataset.* decompress\.sh"):
        check_data({"dataset_dir": str(tmp_path / "PaCo-Dataset"), "dataset": "pairs"})


def test_what_unpacks_missing_images_is_named(config, data):
    shutil.rmtree(data / "images")
    assert "images do not exist" in problem(config)
    (data / "decompress.sh").touch()
    assert f"(cd {data} && bash decompress.sh)" in problem(config)


def test_every_configuration_file_can_be_trained_with():
    files = list((ROOT / "config").glob("*.yaml"))
    assert len(files) == 7
    for file in files:
        values = load_config(file)
        weight = 0.5 if file.stem == "paco_reward_mend" else 0.1  # the published one
        assert values["first_token_weight"] == weight, file
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


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("eval_strategy={}no", "no"),
        ("run_name={}007", "007"),
        ("interleave_probs={}0.5", "0.5"),
        ("do_train={}on", True),
        ("seed={}010", 10),  # of YAML 1.1, this is 8
        ("global_batch_size={}016", 16),
        ("max_samples={}1e4", 10_000),
        ("max_samples={}~", None),
        ("learning_rate={}1e-5", 1e-5),
        ("resume_from_checkpoint={}true", True),
    ],
)
def test_the_option_decides_what_a_word_means(word, value, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(word.replace("={}", ": "))
    (tmp_path / "b.yaml").write_text("base: a.yaml\nlora_rank: 8")
    (tmp_path / "c.yaml").write_text("{}")
    name = word.partition("=")[0]
    given = [word.format("")]
    for config in (load_config(tmp_path / "b.yaml"), load_config(tmp_path / "c.yaml", given)):
        assert config[name] == value
        assert type(config[name]) is type(value)


@pytest.mark.parametrize(
    "word", ["seed=1.5", "max_samples=no", "max_samples=5k", "packing='false'", "lora_alpha=on"]
)
def test_a_word_that_an_option_does_not_take_is_refused(word):
    name = word.partition("=")[0]
    with pytest.raises(UserError, match=f"option {name}: expected "):
        load_config(ROOT / "config" / "toy_reward_lora.yaml", [word])


@pytest.mark.parametrize(
    "change",
    [
        {"model_name_or_path": None},
        {"learning_rte": 1e-4},
        {"save_strategy": "sometimes"},
        {"first_token_weight": 1.5},
        {"use_cpu": "true"},
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(change, tmp_path):
    """In the parent: neither model nor data exist."""
    check_options(MINIMAL)
    (name,) = change
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(MINIMAL | {"dataset_dir": "nowhere", "dataset": "none"} | change))
    named = {"save_strategy": "sometimes"}.get(name, name)
    with pytest.raises(UserError, match=named):
        run(str(file), [], {"NPROC_PER_NODE": "2"})


STANDALONE = ["--nnodes=1", "--nproc_per_node=2", "--standalone"]
FOUR_OF_TWO = {"NNODES": "2", "NPROC_PER_NODE": "4"}
NODES = ["--nnodes=2", "--nproc_per_node=4"]
FIRST = ["--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29500"]
SECOND = ["--node_rank=1", "--master_addr=node0", "--master_port=1234"]


@pytest.mark.parametrize(
    ("gpus", "cpus", "config", "environment", "expected"),
    [
        (2, 16, {}, {}, STANDALONE),
        (8, 16, {"use_cpu": True}, {}, STANDALONE),
        (0, 1, {}, {}, None),
        (8, 16, {}, {"NPROC_PER_NODE": "1"}, None),
        (8, 16, {}, FOUR_OF_TWO, NODES + FIRST),
        (
            8,
            16,
            {},
            FOUR_OF_TWO | {"NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"},
            NODES + SECOND,
        ),
    ],
)
def test_processes_of_a_training(gpus, cpus, config, environment, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert plan_processes(config, environment) == expected


def test_accumulation_counts_the_processes_of_all_nodes(judge_dir, monkeypatch):
    """Without a batch size of a device, it is the 8 of transformers."""
    started = []
    monkeypatch.setattr("llamafactory.train.tuner.run_exp", started.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    train(MINIMAL | {"model_name_or_path": str(judge_dir), "global_batch_size": 96})
    assert [config["gradient_accumulation_steps"] for config in started] == [3]


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "dpo"},
        {"use_dft_loss": True},
        {"train_on_prompt": True},
        {"enable_thinking": True},
        {"average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
        {"packing": True},
        {"packing": True, "neat_packing": True, "template": "qwen3_5"},
    ],
)
def test_combinations_that_make_the_loss_wrong_are_refused(change):
    check_combinations(change | {"first_token_weight": None})
    check_combinations({"packing": True, "neat_packing": True, "first_token_weight": 0.1})
    with pytest.raises(UserError, match=next(iter(change))):
        check_combinations(change | {"first_token_weight": 0.1})
