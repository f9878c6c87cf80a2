"""Problems of a training configuration and its data are reported before anything is loaded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paco_reward.config import check_combinations, load_config
from paco_reward.datasets import check_data
from paco_reward.errors import PacoRewardError
from paco_reward.launch import loss_name, torchrun_command

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "config"


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


def test_data_sets_are_counted_and_others_left_to_llama_factory(config, data, capsys):
    info = json.loads((data / "dataset_info.json").read_text())
    others = {"hub": {"hf_hub_url": "some/set"}, "alpaca": info["pairs"] | {"formatting": "alpaca"}}
    (data / "dataset_info.json").write_text(json.dumps(info | others))
    check_data(config | {"dataset": "pairs, hub, alpaca", "eval_dataset": ["held_out"]})
    assert capsys.readouterr().out.splitlines() == ["dataset pairs: 16 examples", "dataset held_out: 10 examples"]


def test_dataset_problems(config, data, tmp_path):
    assert "known: held_out, pairs" in problem(config | {"dataset": "pair"})
    assert "dataset_info.json does not exist" in problem(config | {"dataset_dir": str(tmp_path)})
    assert "hf download X-GenGroup/PaCo-Dataset" in problem(config | {"dataset_dir": "PaCo-Dataset"})
    rows = json.loads((data / "pairs.json").read_text())
    turns = rows[0]["messages"]
    for number, change, named in (
        (0, {"images": rows[0]["images"][:1]}, "1 images"),
        (2, {"images": ["nowhere.png"] * 2}, "nowhere.png"),
        (3, {"images": None}, "'images'"),
        (1, {"messages": turns[:1]}, "assistant"),
        (1, {"messages": [{"role": "user"}]}, "'content'"),
        (4, {"messages": [turns[0], {"role": "assistant", "content": "Yes. <|image_pad|>"}]}, "<|image_pad|>"),
        (5, {"messages": [turns[0], {"role": "assistant", "content": "No. <image>"}]}, "3 <image> tags"),
    ):
        changed = {key: value for key, value in (rows[number] | change).items() if value is not None}
        (data / "pairs.json").write_text(json.dumps([*rows[:number], changed, *rows[number + 1 :]]))
        message = problem(config)
        assert f"pairs row {number}" in message and named in message
    for text in ("[]", "{broken"):
        (data / "pairs.json").write_text(text)
        assert "pairs.json" in problem(config)
    (data / "pairs.json").unlink()
    with pytest.raises(OSError, match="pairs.json"):
        check_data(config)


def test_other_labels_are_announced(config, data, capsys):
    rows = json.loads((data / "pairs.json").read_text())
    rows[3]["messages"][1]["content"] = "Maybe."
    (data / "pairs.json").write_text(json.dumps(rows))
    check_data(config)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "1 answers" in warning and "row 3" in warning and "Maybe" in warning


def test_configuration_files(tmp_path):
    for name in ("paco_reward_lora", "paco_reward_lora_16gb", "toy_reward_lora"):
        config = load_config(CONFIGS / f"{name}.yaml", ["learning_rate=1e-5"])
        assert config["learning_rate"] == 1e-5 and config["template"] == "qwen2_vl"
        assert config["first_token_weight"] == 0.1 and config["first_token_scheme"] == "sequence"
        assert "released" in loss_name(config) and "null" in loss_name({})
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "list.yaml").write_text("- a")
    for file, overrides in ((CONFIGS / "toy_reward_lora.yaml", ["lr"]), (tmp_path / "bad.yaml", []), (tmp_path / "list.yaml", [])):
        with pytest.raises(PacoRewardError):
            load_config(file, overrides)


def test_the_script_takes_a_file_whose_path_holds_an_equals_sign(tmp_path):
    file = tmp_path / "with=sign" / "my.yaml"
    file.parent.mkdir()
    file.write_text("dataset: mine\ndataset_dir: nowhere\nfirst_token_weight: null\n")
    command = ["env", f"PYTHON={sys.executable}", "bash", str(ROOT / "train/paco_reward.sh"), str(file)]
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
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"packing": True, "neat_packing": True, "template": "qwen3_5"}, "Qwen3.5"),
    ],
)
def test_invalid_combinations(config, named):
    check_combinations(config | {"first_token_weight": None})
    with pytest.raises(PacoRewardError, match=named):
        check_combinations({"first_token_weight": 0.1} | config)
    check_combinations({"first_token_weight": 0.1, "packing": True, "neat_packing": True})


def test_the_torchrun_command():
    assert torchrun_command({}, "c.yaml", [], {"NPROC_PER_NODE": "1"}) is None
    command = torchrun_command({}, "c.yaml", ["a=1"], {"NPROC_PER_NODE": "2", "MASTER_PORT": "1234"})
    assert command[-4:] == ["-m", "paco_reward.launch", "c.yaml", "a=1"]
    assert "--nproc_per_node=2" in command and "--master_port=1234" in command
    several = torchrun_command({}, "c.yaml", [], {"NPROC_PER_NODE": "8", "NNODES": "2", "NODE_RANK": "1"})
    assert "--nnodes=2" in several and "--node_rank=1" in several and "--master_port=29500" in several
    assert torchrun_command({"deepspeed": "ds.json"}, "c.yaml", [], {"NPROC_PER_NODE": "1"}) is not None
