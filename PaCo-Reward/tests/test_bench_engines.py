"""vLLM, transformers and a vLLM server give the same scores."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from bench_tools import HERE, RANK_FOLDER, read_lines
from fakes import free_port

REPO = HERE.parent.parent
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed"),
    pytest.mark.long,
    pytest.mark.timeout(3600),
]


# vLLM's CPU build refuses Qwen3.5 in float32 ("CPU GDN attention requires BF16"), so that its
# scores are rounded.
TOLERANCE = {"qwen3_5": 5e-2}


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def judge(request, answering_judge, tiny, tmp_path):
    if request.param == "qwen2_5_vl":
        return answering_judge
    random = tiny.save_new_judge(tmp_path / "random", request.param)
    return tiny.save_answering(
        random, tmp_path / "judge", least=8
    )  # in bfloat16 larger logits are rounded more


@pytest.fixture
def server(judge):
    """The URL of the judge, served by vLLM through launch.sh."""
    port = free_port()
    variables = {
        "VLLM_MODEL_PATHS": str(judge),
        "VLLM_MODEL_NAMES": "toy",
        "VLLM_PORT": str(port),
        "VLLM_ENGINE": "vllm",
        "VLLM_PYTHON": str(VLLM_PYTHON),
        "PYTHON": sys.executable,
        "VLLM_LABEL": f"bench-engines-{port}",
        "VLLM_START_TIMEOUT": "1500",
    }

    def run(script):
        environment = os.environ | variables
        subprocess.run(["bash", script], cwd=REPO / "PaCo-GRPO", env=environment, check=True)

    try:
        run("vllm_server/launch.sh")
        yield f"http://127.0.0.1:{port}"
    finally:
        run("vllm_server/stop.sh")


def test_engines_agree(judge, bench, tmp_path, request):
    """A server of Qwen3.5 must not let it think; of Qwen2.5-VL: test_launch.py in PaCo-GRPO."""
    family = json.loads((judge / "config.json").read_text())["model_type"]
    engines = {
        "transformers": [sys.executable, "--model", judge, "--engine", "transformers"],
        "vllm": [VLLM_PYTHON, "--model", judge],
    }
    if family == "qwen3_5":
        server = request.getfixturevalue("server")
        engines["server"] = [sys.executable, "--model", "toy", "--server", server]
    scores = {}
    for name, (python, *options) in engines.items():
        command = [python, "eval_vllm.py", *options, "--results_dir", tmp_path / name]
        command += ["--dataset_dir", bench.parent]
        subprocess.run(list(map(str, command)), cwd=RANK_FOLDER, check=True)
        (file,) = (tmp_path / name).glob("*.jsonl")
        scores[name] = np.concatenate([row["scores"] for row in read_lines(file)])
        assert scores[name].shape == (14,)
        expected = scores["transformers"]
        assert scores[name] == pytest.approx(expected, abs=TOLERANCE.get(family, 1e-3)), name
        # Rounding moves the scores of a small judge by a third of their spread, an exchange of
        # answers by all of it.
        assert np.corrcoef(scores[name], expected)[0, 1] > 0.9, (name, scores)
