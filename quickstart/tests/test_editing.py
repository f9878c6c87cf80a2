"""One whole run of quickstart/editing.sh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_small_run_by_its_command(tmp_path):
    clone = tmp_path / "clone"  # a developer's own quickstart/out is left alone
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{REPO}", str(clone)], check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")}
    command = ["bash", "quickstart/editing.sh", "--minutes", "0.2", "--config.test.num_images=8", "--config.eval_freq=1000",
               "--config.sample.unique_sample_num_per_epoch=2", "--config.sample.num_images_per_prompt=4"]  # fmt: skip
    done = subprocess.run(command, cwd=clone, env=env, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = clone / "quickstart" / "out" / "editing"
    policy = json.loads((out / "summary.json").read_text())["policy"]
    assert policy["num_images"] == 8 and (policy["train_resolution"], policy["test_resolution"]) == (64, 64)
    assert "edit score" in done.stdout and (out / "report.html").is_file()
