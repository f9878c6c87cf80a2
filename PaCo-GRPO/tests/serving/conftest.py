import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
REPO = ROOT.parent
sys.path.insert(0, str(ROOT))  # vllm_server is run from its folder, not installed
sys.path.insert(0, str(Path(__file__).parent))
from gateway_tools import health
from serving_tools import Shell, free_port, wait_for

torch.set_num_threads(1)


def load_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny():
    """Makes a Qwen2.5-VL of random weights (shared with PaCo-Reward's tests)."""
    return load_file(REPO / "PaCo-Reward" / "tests" / "tiny_judge.py")


@pytest.fixture(scope="session")
def judge_folder(tiny, tmp_path_factory) -> Path:
    """A random judge, whose Yes and No have larger embeddings: random weights seldom put them among the top 20."""
    folder = tiny.save_judge(tmp_path_factory.mktemp("judge"))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["Yes", "No"])
    with torch.no_grad():
        model.get_input_embeddings().weight[words] *= 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def judge(judge_folder):
    from vllm_server.transformers_engine.model import JudgeModel

    return JudgeModel.load(str(judge_folder), max_model_len=1024)


@pytest.fixture(scope="session")
def engine_url(judge_folder):
    """The transformers engine as a separate process, serving the tiny judge as ``Tiny-Judge``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_server.transformers_engine", "--model", str(judge_folder)]
    command += [
        "--port",
        str(port),
        "--served-model-name",
        "Tiny-Judge",
        "--max-model-len",
        "1024",
        "--max-body-mb",
        "4",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: server.poll() is not None or health(url) == 200, 300)
        assert server.poll() is None, "the engine ended while loading"
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"max_position_embeddings": 2048, "num_attention_heads": 28, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def shell(tmp_path, model):
    shell = Shell(tmp_path)
    yield shell
    root = Path(shell.environment["PACO_RUNTIME_DIR"])
    for label in [path.parent.name for path in root.glob("*/state.json")]:
        shell.run("stop.sh", VLLM_LABEL=label)
