"""Problems of a training configuration are reported before anything is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from paco_reward import preflight
from paco_reward.config import check_combinations, load_config
from paco_reward.errors import PacoRewardError
from paco_reward.launch import torchrun_command

CONFIGS = Path(__file__).parent.parent / "config"


@pytest.fixture
def data(data_dir, tmp_path):
    """A copy of the data sets that a test may break."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


@pytest.fixture
def config(judge_dir, data, tmp_path):
    return {
        "model_name_or_path": str(judge_dir),
        "dataset_dir": str(data),
        "dataset": "pairs",
        "output_dir": str(tmp_path / "out"),
    }


def problem(config) -> str:
    with pytest.raises(PacoRewardError) as caught:
        preflight.check_training(config, lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_valid_configuration_passes(config):
    logged = []
    preflight.check_training(config | {"eval_dataset": "held_out"}, logged.append)
    assert "dataset pairs: 16 examples" in logged and "images: 52 files readable" in logged


def test_model_problems(config, tmp_path):
    folder = tmp_path / "empty"
    for name in ("/no/such", "../quickstart/models/x", "./x/y", str(folder)):
        assert f"{name} does not exist" in problem(config | {"model_name_or_path": name})
    folder.mkdir()
    assert "config.json" in problem(config | {"model_name_or_path": str(folder)})
    (folder / "config.json").write_text("{}")
    assert "weights" in problem(config | {"model_name_or_path": str(folder)})
    assert "model_name_or_path" in problem(config | {"model_name_or_path": None})


@pytest.mark.parametrize("error", ["ConnectError", "RepositoryNotFoundError", "GatedRepoError", "OSError"])
def test_hub_problems(config, monkeypatch, error):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
    raised = {"ConnectError": httpx.ConnectError("no network"), "OSError": OSError("no route")}.get(error)

    def fail(*args, **kwargs):
        raise raised or getattr(errors, error)("none", response=response)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    message = problem(config | {"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"})
    assert "Qwen/Qwen2.5-VL-7B-Instruct" in message and error in message and "hf auth login" in message
    with pytest.raises(PacoRewardError, match="adapter some/lora"):
        preflight.check_adapter("some/lora")


def test_dataset_problems(config, data, tmp_path):
    assert "did you mean pairs?" in problem(config | {"dataset": "pair"})
    assert "names no dataset" in problem(config | {"dataset": None})
    assert "dataset_info.json does not exist" in problem(config | {"dataset_dir": str(tmp_path)})
    rows = json.loads((data / "pairs.json").read_text())
    turns = rows[0]["messages"]
    for number, change, named in (
        (0, {"images": rows[0]["images"][:1]}, "1 images"),
        (3, {"images": None}, "'images'"),
        (1, {"messages": turns[:1]}, "'assistant'"),
        (1, {"messages": [{"role": "user"}]}, "'content'"),
    ):
        changed = {key: value for key, value in (rows[number] | change).items() if value is not None}
        (data / "pairs.json").write_text(json.dumps([*rows[:number], changed, *rows[number + 1 :]]))
        message = problem(config)
        assert f"pairs row {number}" in message and named in message
    for text in ("[]", "{broken"):
        (data / "pairs.json").write_text(text)
        assert "pairs.json" in problem(config)
    (data / "pairs.json").unlink()
    assert "pairs.json does not exist" in problem(config)


def test_other_data_sets_are_left_to_llama_factory(config, data):
    info = json.loads((data / "dataset_info.json").read_text())
    others = {"hub": {"hf_hub_url": "some/set"}, "alpaca": info["pairs"] | {"formatting": "alpaca"}}
    (data / "dataset_info.json").write_text(json.dumps(info | others))
    logged = []
    preflight.check_training(config | {"dataset": "pairs, hub, alpaca"}, logged.append)
    assert sum("left to LLaMA-Factory" in line for line in logged) == 2


def test_unreadable_images_are_counted_and_the_first_are_listed(config, data):
    files = sorted((data / "images").glob("pairs_*.png"))[:7]
    files[0].unlink()
    files[1].write_bytes(b"not a picture")
    Image.open(files[2]).save(files[2], "EPS")
    Image.open(files[3]).save(files[3], "JPEG")
    for file in files[3:]:
        file.write_bytes(file.read_bytes()[:-30])
    message = problem(config)
    assert "7 of 32 images" in message and "not an image" in message and "does not exist" in message
    assert "is a EPS file" in message and "truncated" in message
    assert message.count("pairs row") == preflight.LISTED


def test_no_space_left(config, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    assert "output_dir" in problem(config)


def test_configuration_files(tmp_path):
    for name in ("paco_reward_lora", "paco_reward_lora_16gb", "toy_reward_lora"):
        config = load_config(CONFIGS / f"{name}.yaml", ["learning_rate=1e-5"])
        assert config["learning_rate"] == 1e-5 and config["template"] == "qwen2_vl"
        assert config["first_token_weight"] == 0.1 and config["first_token_scheme"] == "sequence"
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "list.yaml").write_text("- a")
    toy = CONFIGS / "toy_reward_lora.yaml"
    for file, overrides, named in (
        (CONFIGS / "toy.yaml", [], "toy_reward_lora.yaml"),
        (toy, ["lr"], "'lr'"),
        (tmp_path / "bad.yaml", [], "bad.yaml"),
        (tmp_path / "list.yaml", [], "list.yaml"),
    ):
        with pytest.raises(PacoRewardError, match=named):
            load_config(file, overrides)


def test_packages_of_settings(config, monkeypatch):
    missing = {"wandb", "swanlab", "bitsandbytes", "deepspeed"}
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name in missing else object())
    for changes, package in (
        ({"report_to": ["tensorboard", "wandb"]}, "wandb"),
        ({"use_swanlab": True}, "swanlab"),
        ({"quantization_bit": 4}, "bitsandbytes"),
        ({"deepspeed": str(CONFIGS / "deepspeed/zero3.json")}, "deepspeed"),
    ):
        message = problem(config | changes)
        assert f"pip install {package}" in message and next(iter(changes)) in message
    missing.clear()
    assert "no.json cannot be read" in problem(config | {"deepspeed": "no.json"})


@pytest.mark.parametrize("file", sorted((CONFIGS / "deepspeed").glob("*.json")), ids=lambda file: file.stem)
def test_deepspeed_configurations_leave_the_batch_to_the_trainer(file):
    """Every number that the training configuration sets is "auto", so that the two cannot contradict each other."""
    found = json.loads(file.read_text())
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert {found[name] for name in names} == {"auto"} and found["bf16"] == {"enabled": "auto"}
    zero = found["zero_optimization"]
    assert zero["stage"] == int(file.stem[4]) and ("offload" in file.stem) == ("offload_optimizer" in zero)
    assert ("zero3_offload" == file.stem) == ("offload_param" in zero)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"train_on_prompt": True}, "train_on_prompt"),
        ({"packing": True}, "neat_packing"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_invalid_combinations(config, named):
    check_combinations(config)
    with pytest.raises(PacoRewardError, match=named):
        check_combinations({"first_token_weight": 0.1} | config)
    check_combinations({"first_token_weight": 0.1, "packing": True, "neat_packing": True})


def test_the_torchrun_command():
    assert torchrun_command({}, "c.yaml", [], {"NPROC_PER_NODE": "1"}) is None
    command = torchrun_command({}, "c.yaml", ["a=1"], {"NPROC_PER_NODE": "2", "MASTER_PORT": "1234"})
    assert command[-4:] == ["-m", "paco_reward.worker", "c.yaml", "a=1"]
    assert "--nproc_per_node=2" in command and "--master_port=1234" in command
    several = torchrun_command({}, "c.yaml", [], {"NPROC_PER_NODE": "8", "NNODES": "2", "NODE_RANK": "1"})
    assert "--nnodes=2" in several and "--node_rank=1" in several and "--master_port=29500" in several
    assert torchrun_command({"deepspeed": "ds.json"}, "c.yaml", [], {"NPROC_PER_NODE": "1"}) is not None
