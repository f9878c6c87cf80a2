"""One whole quickstart and one short run of the editor, from a clone of the repository."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def run_in_clone(tmp_path_factory):
    """Runs a command in a clone that is set up once; returns quickstart/out and its output."""
    clone = tmp_path_factory.mktemp("whole") / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{REPO}", str(clone)], check=True)
    unset = ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def run(*command: str) -> tuple[Path, str]:
        done = subprocess.run(
            ["bash", *command], cwd=clone, env=env, text=True, check=False, **options
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return clone / "quickstart" / "out", done.stdout

    yield run
    shutil.rmtree(clone / ".venv")  # gigabytes


def test_it_learns_without_a_short_cut_at_the_promised_cost(run_in_clone):
    out, printed = run_in_clone("quickstart/run.sh")
    summary = json.loads((out / "summary.json").read_text())
    base, lora = summary["judge"]["base"], summary["judge"]["lora"]
    assert base["accuracy"] <= 0.65
    assert lora["accuracy"] >= 0.94 and lora["auc"] >= 0.98
    assert len(lora["kinds"]) == 4 and all(
        kind["accuracy"] >= 0.90 for kind in lora["kinds"].values()
    )
    assert summary["rank"]["kendalltau"] > summary["rank"]["histogram"]["kendalltau"]
    policy = summary["policy"]
    assert (policy["train_resolution"], policy["test_resolution"]) == (64, 128)
    assert policy["num_images"] >= 128
    gain = policy["change"]["consistency"]
    assert gain["mean"] >= 0.10 and gain["mean"] > 2 * gain["stderr"]
    assert policy["change"]["agreement"]["mean"] > 0
    assert policy["after"]["choice"] >= 0.75 * policy["before"]["choice"]
    assert policy["change"]["reward"]["mean"] > 0
    assert all(policy["change"][name]["mean"] >= -0.05 for name in ("valid", "distinct"))
    assert set(summary["stage_seconds"]) == {"world", "judge", "rank", "server", "rl"}
    assert summary["minutes"] <= 20  # 15 are promised; a busy machine gets some air
    assert printed.strip().endswith(str(out / "report.html"))
    assert (out / "report.html").read_text().count("<figure>") == 2 * 8  # before and after


def test_a_short_run_of_the_editor(run_in_clone):
    sizes = {
        "test.num_images": 8,
        "eval_freq": 1000,
        "sample.unique_sample_num_per_epoch": 2,
        "sample.num_images_per_prompt": 4,
    }
    options = [f"--config.{name}={value}" for name, value in sizes.items()]
    out, printed = run_in_clone("quickstart/editing.sh", "--minutes", "0.2", *options)
    policy = json.loads((out / "editing" / "summary.json").read_text())["policy"]
    assert policy["num_images"] == 8 and (
        policy["train_resolution"],
        policy["test_resolution"],
    ) == (64, 64)
    assert "edit score" in printed and (out / "editing" / "report.html").is_file()
