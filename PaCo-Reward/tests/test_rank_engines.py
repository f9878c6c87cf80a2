"""The three engines of the benchmarks give the same scores, with the real vLLM in this machine's own environment."""

import json
import os
import socket
import subprocess
import sys

import pytest
from edit_tools import FOLDER as EDIT_FOLDER
from edit_tools import save_jsonl
from rank_tools import HERE, outcome, typed

REPO = HERE.parent.parent
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")


@pytest.fixture
def server(answering_judge, tmp_path):
    """The URL of the toy judge, served by vLLM through launch.sh."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"VLLM_MODEL_PATHS": str(answering_judge), "VLLM_MODEL_NAMES": "toy", "VLLM_PORT": str(port)}
    variables |= {"VLLM_ENGINE": "vllm", "VLLM_PYTHON": str(VLLM_PYTHON), "PYTHON": sys.executable}
    variables |= {"VLLM_LABEL": f"rank-engines-{port}", "VLLM_START_TIMEOUT": "1500"}

    def run(script):
        return subprocess.run(
            ["bash", f"vllm_server/{script}"],
            cwd=REPO / "PaCo-GRPO",
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=1600,
        )

    try:
        started = run("launch.sh")
        assert started.returncode == 0, started.stderr[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        run("stop.sh")


def scores(file):
    return {row["index"]: row["scores"] for row in map(json.loads, file.read_text().splitlines())}


def assert_alike(tables, count):
    """Every engine has every item, and no score differs by more than 2e-2 from that of transformers."""
    reference = tables.pop("transformers")
    assert len(reference) == count
    for name, table in tables.items():
        assert table.keys() == reference.keys(), name
        for index, values in table.items():
            assert values == pytest.approx(reference[index], abs=2e-2), (name, index)
    everything = [value for values in reference.values() for value in values]
    assert max(everything) - min(everything) > 0.1  # else any engine would agree


@needs_vllm
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_engines_agree(answering_judge, bench, examples, tmp_path, server):
    """ConsistencyRank candidate by candidate, and EditReward-Bench edit by edit."""
    edits = save_jsonl(examples, tmp_path / "edits")
    judges = {
        "vllm": (VLLM_PYTHON, ["--model", answering_judge]),
        "transformers": (sys.executable, ["--model", answering_judge, "--engine", "transformers"]),
        "server": (sys.executable, ["--model", "toy", "--server", server]),
    }
    found, edited = {}, {}
    for name, (python, judge) in judges.items():
        judge = [*judge, "--batch_size", "8", "--results_dir"]
        run = typed("eval_vllm.py", *judge, tmp_path / name, "--dataset_dir", bench.parent, python=python)
        status, output = outcome(run, timeout=1500)
        assert status == 0, output[-3000:]
        found[name] = scores(next((tmp_path / name).glob("*.jsonl")))
        arguments = ["--dataset", edits, "--output", tmp_path / f"{name}_summary"]
        place = tmp_path / f"{name}_edits"
        run = typed(EDIT_FOLDER / "evaluation.py", *judge, place, *arguments, python=python)
        status, output = outcome(run, timeout=1500)
        assert status == 0, output[-3000:]
        edited[name] = scores(next(place.glob("*.jsonl")))
    assert_alike(found, 5)
    assert_alike(edited, len(examples))


@needs_vllm
@pytest.mark.long
def test_vllms_environment_names_what_it_lacks(answering_judge, bench, tmp_path):
    """It has no paco-reward: --engine transformers there is one clear line."""
    arguments = ["--model", answering_judge, "--dataset_dir", bench.parent, "--results_dir", tmp_path, "--engine"]
    status, output = outcome(typed("eval_vllm.py", *arguments, "transformers", python=VLLM_PYTHON))
    assert status == 2 and "--engine transformers needs paco-reward" in output and ".venv/bin/python" in output
    assert "Traceback" not in output
