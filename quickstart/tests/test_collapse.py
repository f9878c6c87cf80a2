"""A learning rate that is far too high on the toy world: the run warns immediately, and stops with its state saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paco_toy.build_world import build_prompts

REPO = Path(__file__).resolve().parents[2]


def train(folder: Path, learning_rate: float, *options: str) -> tuple[int, str, list[dict]]:
    """Two small epochs at 32 px, the oracle as reward; exit status, log, rows of the training epochs."""
    oracle = '{"paco_toy.oracle:oracle_consistency": 1.0}'
    values = {
        "run_name": f"lr{learning_rate:g}", "save_dir": folder, "dataset": folder / "prompts", "num_epochs": 2,
        "train.lora_targets": "default", "train.lora_rank": 8, "train.lora_alpha": 16,  # with which images lose contrast
        "train.learning_rate": learning_rate, "train.reward_fn": oracle, "train.reward_fn_kwargs": "",
        "test.reward_fn": oracle, "test.at_start": False, "test.resolution": 32, "test.num_images": 4,
        "train.resolution": 32, "sample.num_images_per_prompt": 8, "sample.unique_sample_num_per_epoch": 4,
        "sample.batch_size": 32, "train.batch_size": 32, "logging_platform": "none",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "scripts/train.py", "--config", "config/grpo.py:toy_t2is", *options]
        + [f"--config.{key}={value}" for key, value in values.items()],
        cwd=REPO / "PaCo-GRPO", capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    lines = (folder / values["run_name"] / "metrics.jsonl").read_text().splitlines()
    return done.returncode, done.stderr, [row for row in map(json.loads, lines) if row["phase"] == "train"]


@pytest.mark.long
def test_a_learning_rate_far_too_high_on_the_toy_world(tmp_path):
    build_prompts(tmp_path / "prompts", seed=0, train=64, test=8)
    status, said, rows = train(tmp_path, 2e-3)
    assert status == 0 and "Likely cause" not in said, said
    assert rows[-1]["health/velocity_change"] < 0.1

    status, said, rows = train(tmp_path, 0.1)
    assert status == 0, said
    assert "left its base model" in said and "health/velocity_change" in said and "config.train.learning_rate is too high" in said
    assert rows[0]["health/velocity_change"] > 0.75
    assert rows[1]["health/pixel_std_vs_first"] < 0.8  # epoch 2 samples with the broken weights: images lose contrast

    status, said, rows = train(tmp_path, 0.11, "--config.train.stop_on_collapse=true")
    assert status == 3 and len(rows) == 1
    assert "stopped: config.train.stop_on_collapse" in said
    assert (tmp_path / "lr0.11" / "checkpoints" / "epoch_0001" / "state" / "trainer.json").is_file()
