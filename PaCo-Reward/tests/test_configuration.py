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
from training_tools import train_config

from paco_reward.config import check_combinations, load_config
from paco_reward.datasets import check_data
from paco_reward.errors import PacoRewardError
from paco_reward.launch import run

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


def test_other_labels_are_announced(config, data, capsys):
    rows = json.loads((data / "pairs.json").read_text())
    rows[3]["messages"][1]["content"] = "Maybe."
    (data / "pairs.json").write_text(json.dumps(rows))
    info = json.loads((data / "dataset_info.json").read_text())
    others = {"hub": {"hf_hub_url": "some/set"}, "alpaca": info["pairs"] | {"formatting": "alpaca"}}
    (data / "dataset_info.json").write_text(json.dumps(info | others))
    check_data(
        config | {"dataset": "pairs, hub, alpaca", "eval_dataset": ["held_out"]}
    )  # two are left to LLaMA-Factory
    (warning,) = capsys.readouterr().out.splitlines()
    assert "1 answers" in warning and "row 3" in warning and "Maybe" in warning


def test_configuration_files():
    for name in ("paco_reward_lora", "paco_reward_lora_16gb", "toy_reward_lora"):
        config = load_config(ROOT / "config" / f"{name}.yaml", ["learning_rate=1e-5"])
        assert config["learning_rate"] == 1e-5 and config["template"] == "qwen2_vl"
        assert config["first_token_weight"] == 0.1 and config["first_token_scheme"] == "sequence"
    with pytest.raises(PacoRewardError):
        load_config(ROOT / "config" / "toy_reward_lora.yaml", ["lr"])


def test_the_script_takes_a_file_whose_path_holds_an_equals_sign(tmp_path):
    file = tmp_path / "with=sign" / "my.yaml"
    file.parent.mkdir()
    file.write_text("dataset: mine\ndataset_dir: nowhere\nfirst_token_weight: null\n")
    command = [
        "env",
        f"PYTHON={sys.executable}",
        "bash",
        str(ROOT / "train/paco_reward.sh"),
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "nowhere/dataset_info.json" in done.stderr


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"first_token_weight": 1.5}, "first_token_weight"),
        ({"first_token_scheme": "mean"}, "first_token_scheme"),
        ({"stage": "dpo"}, "stage"),
        ({"use_dft_loss": True}, "use_dft_loss"),
        ({"train_on_prompt": True}, "train_on_prompt"),
        ({"packing": True}, "neat_packing"),
        ({"packing": True, "neat_packing": True}, "Qwen3.5"),
    ],
)
def test_combinations_invalid_for_qwen3_5_are_refused_before_processes_start(
    config, named, data_dir, tmp_path
):
    check_combinations(config | {"first_token_weight": None})
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    given = {"model_name_or_path": str(tmp_path), "dataset_dir": str(data_dir), "dataset": "pairs"}
    (file := tmp_path / "train.yaml").write_text(
        json.dumps({"first_token_weight": 0.1} | given | config)
    )
    with pytest.raises(PacoRewardError, match=named):
        run(str(file), [], {"NPROC_PER_NODE": "2"})
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
