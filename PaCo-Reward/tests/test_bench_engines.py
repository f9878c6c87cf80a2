"""vLLM and transformers give the same scores. A vLLM server: test_launch.py in PaCo-GRPO."""

import json
import subprocess
import sys

import numpy as np
import pytest
from bench_tools import HERE, RANK_FOLDER, read_lines

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


def test_engines_agree(judge, bench, tmp_path):
    family = json.loads((judge / "config.json").read_text())["model_type"]
    scores = {}
    for name, python in (("transformers", sys.executable), ("vllm", VLLM_PYTHON)):
        command = [python, "eval_vllm.py", "--engine", name, "--model", judge]
        command += ["--results_dir", tmp_path / name, "--dataset_dir", bench.parent]
        subprocess.run(list(map(str, command)), cwd=RANK_FOLDER, check=True)
        (file,) = (tmp_path / name).glob("*.jsonl")
        scores[name] = np.concatenate([row["scores"] for row in read_lines(file)])
        assert scores[name].shape == (14,)
        expected = scores["transformers"]
        assert scores[name] == pytest.approx(expected, abs=TOLERANCE.get(family, 1e-3)), name
        # Rounding moves the scores of a small judge by a third of their spread, an exchange of
        # answers by all of it.
        assert np.corrcoef(scores[name], expected)[0, 1] > 0.9, (name, scores)
