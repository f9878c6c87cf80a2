"""Problems of a training configuration and its data are reported before anything is loaded."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from training_tools import train_config

from paco_reward import overlay
from paco_reward.config import check_combinations, check_names, check_types, load_config
from paco_reward.datasets import check_data
from paco_reward.errors import PacoRewardError
from paco_reward.launch import plan_processes, run, warn_of_slow_attention

ROOT = Path(__file__).parent.parent


@pytest.fixture
def data(data_dir, tmp_path):
    """A copy of the data sets that a test may break."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


@pytest.fixture
def config(data):
    return {"dataset_dir": str(data), "dataset": "pairs"}


def problem(config) -> str:
    with pytest.raises(PacoRewardError) as caught:
        check_data(config)
    return str(caught.value)


def test_dataset_problems(config, data, tmp_path):
    assert "held_out, pairs" in problem(config | {"dataset": "pair"})
    assert "dataset_info.json does not exist" in problem(config | {"dataset_dir": str(tmp_path)})
    assert "hf download X-GenGroup/PaCo-Dataset" in problem(
        config | {"dataset_dir": "PaCo-Dataset"}
    )
    rows = json.loads((data / "pairs.json").read_text())
    turns = rows[0]["messages"]
    for number, change, named in (
        (2, {"images": ["nowhere.png"] * 2}, "nowhere.png"),
        (1, {"messages": turns[:1]}, "assistant"),
        (
            4,
            {"messages": [turns[0], {"role": "assistant", "content": "Yes. <|image_pad|>"}]},
            "<|image_pad|>",
        ),
    ):
        (data / "pairs.json").write_text(
            json.dumps([*rows[:number], rows[number] | change, *rows[number + 1 :]])
        )
        message = problem(config)
        assert f"pairs row {number}" in message and named in message
    (data / "pairs.json").write_text("{broken")
    assert "pairs.json" in problem(config)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ([], "not an object"),
        ({"pairs": "pairs.json"}, "must be an object"),
        ({"pairs": {"file_name": 3}}, "must be an object"),
        ({"pairs": {"file_name": "pairs.json", "columns": ["a"]}}, "must be an object"),
    ],
)
def test_a_damaged_index_of_data_sets_is_a_message(config, data, index, named):
    (data / "dataset_info.json").write_text(json.dumps(index))
    assert named in problem(config)


def test_images_and_their_tags_are_equally_many(config, data):
    rows = json.loads((data / "pairs.json").read_text())
    rows[2]["messages"][0]["content"] = "<image>" + rows[2]["messages"][0]["content"]
    (data / "pairs.json").write_text(json.dumps(rows))
    message = problem(config)
    assert "pairs row 2" in message and "3 times <image>" in message and "2 images" in message


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("decompress.sh", "cd {data} && bash decompress.sh"),
        ("images.tar.gz", "unpack the archives in {data}, such as images.tar.gz"),
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
    assert "images do not exist, first:" in message and remedy.format(data=data) in message
    assert bool(remedy) == ("unpack" in message)


@pytest.mark.parametrize("answer", ["Maybe.", "Not sure", "None of it", "Yesterday", "yes"])
def test_other_labels_are_announced(config, data, caplog, answer):
    rows = json.loads((data / "pairs.json").read_text())
    rows[3]["messages"][1]["content"] = answer
    (data / "pairs.json").write_text(json.dumps(rows))
    info = json.loads((data / "dataset_info.json").read_text())
    others = {"hub": {"hf_hub_url": "some/set"}, "alpaca": info["pairs"] | {"formatting": "alpaca"}}
    (data / "dataset_info.json").write_text(json.dumps(info | others))
    # Two of them are left to LLaMA-Factory.
    check_data(config | {"dataset": "pairs, hub, alpaca", "eval_dataset": ["held_out"]})
    (warning,) = caplog.messages
    assert "1 answers" in warning and "row 3" in warning and repr(answer) in warning


# What the files of other bases change of paco_reward_lora.yaml (test_published.py has its values).
CHANGES = {
    "paco_reward_lora_16gb": {
        "quantization_bit": 4,
        "output_dir": "./checkpoints/paco-reward-7b_lora_sft_16gb",
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "preprocessing_num_workers": 16,
        "dataloader_num_workers": 4,
    },
    "paco_reward_qwen3_vl_4b": {
        "model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct",
        "template": None,
        "output_dir": "./checkpoints/paco_reward_qwen3_vl_4b",
        "run_name": "Qwen3-VL-4B-Instruct-SFT-LoRA-CoT",
    },
    "paco_reward_qwen3_vl_8b": {
        "model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct",
        "template": None,
        "output_dir": "./checkpoints/paco_reward_qwen3_vl_8b",
        "run_name": "Qwen3-VL-8B-Instruct-SFT-LoRA-CoT",
    },
    "paco_reward_qwen3_5": {
        "model_name_or_path": "Qwen/Qwen3.5-9B",
        "template": None,
        "enable_thinking": False,
        "output_dir": "./checkpoints/paco_reward_qwen3_5",
        "run_name": "Qwen3.5-9B-SFT-LoRA-CoT",
    },
}
TOY = {
    "model_name_or_path": "../quickstart/models/judge",
    "flash_attn": "sdpa",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 64,
    "lora_alpha": 128,
    "lora_target": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,"
    "attn.qkv,attn.proj,mlp.0,mlp.2",
    "freeze_vision_tower": False,
    "freeze_multi_modal_projector": False,
    "first_token_weight": 0.1,
    "first_token_scheme": "sequence",
    "dataset_dir": "../quickstart/out/world/reward_data",
    "dataset": "toy_pairs_cot_train",
    "template": "qwen2_vl",
    "cutoff_len": 512,
    "max_samples": 5000,
    "preprocessing_num_workers": 2,
    "dataloader_num_workers": 0,
    "output_dir": "../quickstart/out/judge_lora",
    "overwrite_output_dir": True,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
    "plot_loss": True,
    "per_device_train_batch_size": 8,
    "global_batch_size": 16,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.05,
    "num_train_epochs": 5.0,
    "disable_gradient_checkpointing": True,
    "use_cpu": True,
}


def test_every_configuration_file_has_its_values():
    overlay.install()  # our options are known to LLaMA-Factory
    base = load_config(ROOT / "config" / "paco_reward_lora.yaml")
    expected = {name: base | changes for name, changes in CHANGES.items()}
    expected |= {"paco_reward_lora": base, "toy_reward_lora": TOY}
    assert {file.stem for file in (ROOT / "config").glob("*.yaml")} == set(expected)
    for name, values in expected.items():
        assert load_config(ROOT / "config" / f"{name}.yaml") == values
        check_types(values)
        check_combinations(values)
        check_names(values)


def test_the_deepspeed_file_of_the_readme_is_there():
    from transformers.integrations import HfDeepSpeedConfig  # noqa: F401  (reads such files)

    (file,) = (ROOT / "config" / "deepspeed").iterdir()
    assert f"deepspeed=config/deepspeed/{file.name}" in (ROOT / "README.md").read_text()
    settings = json.loads(file.read_text())["zero_optimization"]
    assert settings["stage"] == 3 and settings["stage3_gather_16bit_weights_on_model_save"] is True
    assert settings["offload_param"] == settings["offload_optimizer"]
    assert settings["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_file_with_a_base_has_its_values_unless_it_replaces_them(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("lora_rank: 4\nlearning_rate: 1\ncutoff_len: 9\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nlora_rank: 8\n")
    (tmp_path / "sub" / "c.yaml").write_text("base: ../b.yaml\ncutoff_len: null\n")
    config = load_config(tmp_path / "sub" / "c.yaml", ["learning_rate=2e-5"])
    assert config == {"lora_rank": 8, "learning_rate": 2e-5, "cutoff_len": None}
    file = tmp_path / "wrong.yaml"
    for text in ("- a list", "a: [", "base: wrong.yaml", "base: 3"):
        file.write_text(text)
        with pytest.raises((PacoRewardError, OSError), match=r"wrong\.yaml|'3'|/3"):
            load_config(file)
    with pytest.raises(PacoRewardError, match="'lr' is not key=value"):
        load_config(tmp_path / "a.yaml", ["lr"])


MINIMAL = {"model_name_or_path": "model", "output_dir": "out"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"model_name_or_path": ["a"]}, "model_name_or_path"),
        ({"output_dir": ""}, "output_dir is missing"),
        ({"first_token_weight": "0.1"}, "first_token_weight must be a number.*'0.1'"),
        ({"first_token_weight": True}, "first_token_weight"),
        ({"first_token_weight": [0.1]}, "first_token_weight"),
        ({"first_token_weight": float("nan")}, "first_token_weight"),
        ({"first_token_weight": 1.5}, "first_token_weight"),
        ({"first_token_scheme": None}, "first_token_scheme must be sequence or released, not None"),
        ({"first_token_scheme": ["sequence"]}, "first_token_scheme"),
        ({"first_token_scheme": "mean"}, "first_token_scheme"),
        ({"first_token_accuracy": "yes"}, "first_token_accuracy must be true or false"),
        ({"first_token_accuracy": None}, "first_token_accuracy must be true or false"),
        ({"global_batch_size": "64"}, "global_batch_size must be a whole number"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 6.5}, "global_batch_size"),
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps"),
        ({"dataset": 3}, "dataset must hold names"),
        ({"eval_dataset": [3]}, "eval_dataset must hold names"),
        ({"dataset_dir": 3}, "dataset_dir must be a text"),
        ({"use_cpu": "true"}, "use_cpu must be true or false"),
    ],
)
def test_an_option_of_ours_with_a_wrong_type_is_a_message(changes, named):
    check_types(MINIMAL)
    with pytest.raises(PacoRewardError, match=named):
        check_types(MINIMAL | changes)


def test_a_misspelt_option_is_refused_with_the_nearest_one():
    with pytest.raises(PacoRewardError, match="no option learning_rte; do you mean learning_rate"):
        check_names(MINIMAL | {"learning_rte": 1e-4})


def test_a_model_that_is_not_there_is_a_message(config, tmp_path, monkeypatch):
    for name in ("nowhere/at/all", "some-organization/some-model"):
        file = tmp_path / "train.yaml"
        file.write_text(json.dumps(MINIMAL | config | {"model_name_or_path": name}))
        started = time.monotonic()
        with pytest.raises(OSError, match=name):
            run(str(file), [], {})
        assert time.monotonic() - started < 15


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
    for name in ("NNODES", "NPROC_PER_NODE"):
        for text in ("two", "0", "-1", "1:2"):
            with pytest.raises(PacoRewardError, match=f"{name} is a number from 1"):
                arguments_of({}, **{name: text})


def test_windows_that_are_computed_one_by_one_are_announced_on_a_gpu_alone(monkeypatch, caplog):
    def warnings(config, model_type="qwen2_5_vl"):
        caplog.clear()
        warn_of_slow_attention(config, model_type)
        return caplog.messages

    assert not warnings({})  # without a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for config in ({}, {"flash_attn": "auto"}, {"flash_attn": "sdpa"}):
        (message,) = warnings(config)
        assert "pip install flash-attn" in message and "flash_attn=fa2" in message
    assert not warnings({"flash_attn": "fa2"}) and not warnings({"use_cpu": True})
    assert not warnings({}, "qwen3_vl") and not warnings({}, "qwen3_5") and not warnings({}, None)


def test_the_script_takes_a_file_whose_path_holds_an_equals_sign(tmp_path):
    file = tmp_path / "with=sign" / "my.yaml"
    file.parent.mkdir()
    file.write_text("dataset: mine\ndataset_dir: nowhere\nmodel_name_or_path: m\noutput_dir: out\n")
    command = [
        "env",
        f"PYTHON={sys.executable}",
        "bash",
        str(ROOT / "train/paco_reward.sh"),
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "nowhere/dataset_info.json" in done.stderr


def test_the_script_says_what_it_takes():
    script = ["bash", str(ROOT / "train/paco_reward.sh"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    for word in ("key=value", "CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "MASTER_PORT", "PYTHON"):
        assert word in done.stdout
    assert not done.stderr and "#" not in done.stdout


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"stage": "dpo"}, "stage"),
        ({"use_dft_loss": True}, "use_dft_loss"),
        ({"use_mca": True}, "use_mca"),
        ({"train_on_prompt": True}, "train_on_prompt"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"packing": True}, "neat_packing"),
        ({"packing": True, "neat_packing": True}, "Qwen3.5"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_combinations_invalid_for_qwen3_5_are_refused_before_processes_start(
    config, named, data_dir, tmp_path
):
    check_combinations(config | {"first_token_weight": None})
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    options = {
        "model_name_or_path": str(tmp_path),
        "output_dir": str(tmp_path / "out"),
        "dataset_dir": str(data_dir),
        "dataset": "pairs",
        "first_token_weight": 0.1,
    }
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(options | config))
    with pytest.raises(PacoRewardError, match=named):
        run(str(file), [], {"NPROC_PER_NODE": "2"})
    assert not (tmp_path / "out").exists()
    check_combinations({"first_token_weight": 0.1, "packing": True, "neat_packing": True})


@pytest.mark.slow
def test_a_signal_to_the_command_ends_its_processes(judge_dir, data_dir, tmp_path):
    """As a scheduler's: nothing trains on, or keeps a GPU."""
    (file := tmp_path / "train.yaml").write_text(
        json.dumps(train_config(judge_dir, data_dir, tmp_path, max_steps=999))
    )
    command = [sys.executable, "-m", "paco_reward.cli", "train", str(file)]
    training = psutil.Popen(
        command, env=os.environ | {"NPROC_PER_NODE": "2"}, stderr=subprocess.DEVNULL
    )
    while (
        len(workers := [p for p in training.children(recursive=True) if os.getsid(p.pid) == p.pid])
        < 2
    ):
        time.sleep(0.1)
    training.terminate()
    assert not psutil.wait_procs([training, *workers], 20)[1]
