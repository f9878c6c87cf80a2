"""The judge on a pretended GPU (tests/pretend_cuda.py at the root): scores as on the CPU, training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from pretend_cuda import pretended_gpu
from training_tools import TIMEOUT, train_config

from paco_judge.scorer import JudgeScorer
from paco_reward.datasets import labeled_pairs

GPU = Path(__file__).resolve().parents[2] / "tests" / "pretend_cuda.py"


@pytest.mark.slow
def test_scores_are_those_of_the_cpu(scorer, judge_dir, data_dir):
    rows, _ = labeled_pairs(data_dir, "pairs")
    pairs = [rows[number] for number in range(4)]
    expected = [verdict.p_yes for verdict in scorer.score(pairs)]
    with pretended_gpu():
        on_gpu = JudgeScorer.from_pretrained(judge_dir, batch_size=4)
        assert next(on_gpu.model.parameters()).is_cuda
        scores = [verdict.p_yes for verdict in on_gpu.score(pairs)]
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.long
def test_training_in_bf16(judge_dir, data_dir, tmp_path):
    config = train_config(judge_dir, data_dir, tmp_path / "out", bf16=True)
    del config["use_cpu"]
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NPROC_PER_NODE": "1"}
    command = [sys.executable, str(GPU), "-m", "paco_reward.cli", "train", str(file)]
    options = {"env": os.environ | settings, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=TIMEOUT, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 2 and np.isfinite(losses).all()
