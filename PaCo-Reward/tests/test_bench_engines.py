"""vLLM, transformers and a vLLM server give the same scores, with the real vLLM in its own environment."""

import json
import os
import socket
import subprocess
import sys

import pytest
from bench_tools import EDIT_FOLDER, HERE, outcome, save_answering, save_jsonl, start_script

REPO = HERE.parent.parent
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed"),
    pytest.mark.long,
    pytest.mark.timeout(3600),
]


# vLLM's CPU build refuses Qwen3.5 in float32 ("CPU GDN attention requires BF16"): its scores are rounded.
TOLERANCE = {"qwen3_5": 5e-2}


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def judge(request, answering_judge, tiny, tmp_path):
    """The toy judge, and random ones of the newer families."""
    if request.param == "qwen2_5_vl":
        return answering_judge
    random = tiny.save_new_judge(tmp_path / "random", request.param)
    return save_answering(random, tmp_path / "judge", tiny, least=8)  # in bfloat16 larger logits are rounded more


@pytest.fixture
def server(judge):
    """The URL of the judge, served by vLLM through launch.sh."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"VLLM_MODEL_PATHS": str(judge), "VLLM_MODEL_NAMES": "toy", "VLLM_PORT": str(port)}
    variables |= {"VLLM_ENGINE": "vllm", "VLLM_PYTHON": str(VLLM_PYTHON), "PYTHON": sys.executable}
    variables |= {"VLLM_LABEL": f"bench-engines-{port}", "VLLM_START_TIMEOUT": "1500"}
    options = {"cwd": REPO / "PaCo-GRPO", "env": {**os.environ, **variables}, "capture_output": True, "text": True}
    try:
        started = subprocess.run(["bash", "vllm_server/launch.sh"], check=False, timeout=1600, **options)
        assert started.returncode == 0, started.stderr[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run(["bash", "vllm_server/stop.sh"], check=False, timeout=600, **options)


def test_three_engines_agree(judge, bench, examples, tmp_path, server):
    """ConsistencyRank candidate by candidate, and EditReward-Bench edit by edit."""
    tolerance = TOLERANCE.get(json.loads((judge / "config.json").read_text())["model_type"], 1e-3)
    data = save_jsonl(examples, tmp_path / "edits")
    judges = {
        "transformers": (sys.executable, ["--model", judge, "--engine", "transformers"]),
        "vllm": (VLLM_PYTHON, ["--model", judge]),
        "server": (sys.executable, ["--model", "toy", "--server", server]),
    }
    benchmarks = {
        "eval_vllm.py": ["--dataset_dir", bench.parent],
        EDIT_FOLDER / "evaluation.py": ["--dataset", data, "--output", tmp_path / "summary"],
    }
    for number, (script, arguments) in enumerate(benchmarks.items()):
        reference = None
        for name, (python, options) in judges.items():
            folder = tmp_path / f"{name}-{number}"
            run = start_script(script, *options, *arguments, "--results_dir", folder, python=python)
            status, output = outcome(run, timeout=1500)
            assert status == 0, output[-3000:]
            rows = map(json.loads, next(folder.glob("*.jsonl")).read_text().splitlines())
            scores = {row["index"]: row["scores"] for row in rows}
            reference = reference or scores
            assert scores.keys() == reference.keys() and len(scores) == (len(examples) if number else 5), name
            for index, values in scores.items():
                assert values == pytest.approx(reference[index], abs=tolerance), (name, index)
        values = [value for values in reference.values() for value in values]
        assert max(values) - min(values) > 0.1  # otherwise any engine would agree
