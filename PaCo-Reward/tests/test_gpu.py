"""The judge on a pretended GPU (tests/pretend_cuda.py at the root): scores as on the CPU, training."""

from pathlib import Path

import numpy as np
import pytest
from pretend_cuda import pretended_gpu
from training_tools import losses, run_processes, train_config

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
    run_processes([str(GPU), "-m", "paco_reward.cli", "train"], [config], tmp_path)
    values = losses(tmp_path / "out")
    assert len(values) == 2 and np.isfinite(values).all()
