"""One whole quickstart and one short run of the editor, from a clone of the repository."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(2400)]
UNSET = ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{REPO}", folder], check=True)
    yield folder
    shutil.rmtree(folder / ".venv")  # gigabytes


def run(clone: Path, *command: str) -> None:
    unset = [f"--unset={name}" for name in UNSET]
    subprocess.run(["env", *unset, "bash", *command], cwd=clone, check=True)


def test_it_learns_without_a_short_cut_at_the_promised_cost(clone):
    run(clone, "quickstart/run.sh")
    out = clone / "quickstart" / "out"
    summary = json.loads((out / "summary.json").read_text())
    log = (out / "logs" / "2-train.log").read_text()
    (answers,) = re.findall(r"training pairs: (\d+) Yes, (\d+) No\n", log)
    assert len(set(answers)) == 1  # of both equally many, said once
    base = summary["judge"]["base"]
    lora = summary["judge"]["lora"]
    assert (base["accuracy"] or 0.5) <= 0.65  # None: it has no score
    assert lora["accuracy"] >= 0.94
    assert lora["auc"] >= 0.98
    accuracies = [kind["accuracy"] for kind in lora["kinds"].values()]
    assert len(accuracies) == 4
    assert min(accuracies) >= 0.90
    assert summary["rank"]["kendalltau"] > summary["rank"]["histogram"]["kendalltau"]
    policy = summary["policy"]
    assert (policy["train_resolution"], policy["test_resolution"]) == (64, 128)
    assert policy["num_images"] >= 128
    change = {name: values["mean"] for name, values in policy["change"].items()}
    assert change["consistency"] >= 0.10
    assert change["consistency"] > 2 * policy["change"]["consistency"]["stderr"]
    assert change["agreement"] > 0
    assert change["reward"] > 0
    assert min(change["valid"], change["distinct"]) >= -0.05
    assert policy["after"]["choice"] >= 0.75 * policy["before"]["choice"]
    assert set(summary["stage_seconds"]) == {"world", "judge", "rank", "server", "rl"}
    assert summary["minutes"] <= 20  # ten are promised; a busy machine gets some air
    assert (out / "report.html").read_text().count("<figure>") == 2 * 8  # before and after


def test_a_short_run_of_the_editor(clone):
    sizes = {
        "test.num_images": 8,
        "eval_freq": 1000,
        "sample.unique_sample_num_per_epoch": 2,
        "sample.num_images_per_prompt": 4,
    }
    options = [f"--config.{name}={value}" for name, value in sizes.items()]
    run(clone, "quickstart/editing.sh", "--minutes", "0.2", *options)
    out = clone / "quickstart" / "out" / "editing"
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["policy"]["change"]) == {"oracle_edit", "oracle_followed", "oracle_kept"}
    assert (out / "report.html").is_file()
