import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # vllm_server is run from its folder, not installed
sys.path[:0] = [str(Path(__file__).parent), str(ROOT.parent / "PaCo-Reward" / "tests")]
from serving_tools import Shell

from paco_judge.scorer import JudgeScorer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny():
    """Makes a Qwen2.5-VL of random weights (shared with PaCo-Reward's tests)."""
    import tiny_judge

    return tiny_judge


@pytest.fixture(scope="session")
def judge_folder(tiny, tmp_path_factory) -> Path:
    """A random judge whose Yes and No have larger embeddings.

    Random weights seldom put them among the top 20.
    """
    folder = tiny.save_judge(tmp_path_factory.mktemp("judge"))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["Yes", "No"])
    with torch.no_grad():
        model.get_input_embeddings().weight[words] *= 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scorer(judge_folder):
    return JudgeScorer.from_pretrained(judge_folder)


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"max_position_embeddings": 2048, "num_attention_heads": 28, "num_key_value_heads": 4}
    quantized = {}  # its weights are then not checked, which takes seconds
    config = {"model_type": "qwen2_5_vl", "text_config": text, "quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def two(model) -> dict:
    """Variables of a launch with two models."""
    shutil.copytree(model, model.parent / "second")
    return {"VLLM_MODEL_PATHS": "model,second", "VLLM_MODEL_NAMES": "Judge,Other"}


@pytest.fixture
def shell(tmp_path, model):
    shell = Shell(tmp_path)
    yield shell
    root = Path(shell.environment["PACO_RUNTIME_DIR"])
    for label in [path.parent.name for path in root.glob("*/state.json")]:
        shell.run("stop.sh", VLLM_LABEL=label)
