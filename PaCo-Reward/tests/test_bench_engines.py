"""vLLM, transformers and a vLLM server give the same scores."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from bench_tools import HERE, RANK_FOLDER
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
    variables = {"VLLM_MODEL_PATHS": str(judge), "VLLM_MODEL_NAMES": "toy", "VLLM_PORT": str(port)}
    variables |= {"VLLM_ENGINE": "vllm", "VLLM_PYTHON": str(VLLM_PYTHON), "PYTHON": sys.executable}
    variables |= {"VLLM_LABEL": f"bench-engines-{port}", "VLLM_START_TIMEOUT": "1500"}
    options = {
        "cwd": REPO / "PaCo-GRPO",
        "env": {**os.environ, **variables},
        "capture_output": True,
        "text": True,
    }
    try:
        started = subprocess.run(
            ["bash", "vllm_server/launch.sh"], check=False, timeout=1600, **options
        )
        assert started.returncode == 0, started.stderr[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run(["bash", "vllm_server/stop.sh"], check=False, timeout=600, **options)


def test_three_engines_agree(judge, bench, tmp_path, server):
    tolerance = TOLERANCE.get(json.loads((judge / "config.json").read_text())["model_type"], 1e-3)
    scores = {}
    for name, python, options in (
        ("transformers", sys.executable, ["--model", judge, "--engine", "transformers"]),
        ("vllm", VLLM_PYTHON, ["--model", judge]),
        ("server", sys.executable, ["--model", "toy", "--server", server]),
    ):
        folder = tmp_path / name
        command = [
            python,
            "eval_vllm.py",
            *options,
            "--dataset_dir",
            bench.parent,
            "--results_dir",
            folder,
        ]
        command = list(map(str, command))
        run = subprocess.run(
            command, cwd=RANK_FOLDER, capture_output=True, text=True, timeout=1500, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        rows = map(json.loads, next(folder.glob("*.jsonl")).read_text().splitlines())
        rows = sorted(rows, key=lambda row: row["index"])
        scores[name] = np.concatenate([row["scores"] for row in rows])
        assert scores[name] == pytest.approx(scores["transformers"], abs=tolerance), name
    assert (
        scores["server"].shape == (14,) and np.ptp(scores["server"]) > 0.1
    )  # otherwise any engine would agree
