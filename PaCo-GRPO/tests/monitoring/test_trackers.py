"""The metrics file; trackers with their real packages, offline, and errors where one is missing."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import PartialState

from paco_grpo.monitoring.trackers import MetricsFile, Tracker


@pytest.fixture(autouse=True)
def processes():
    """As in a run, where trackers log on the main process."""
    PartialState()


def test_metrics_continue_where_the_run_resumes(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for epoch in range(4):
        phase = "eval" if epoch == 2 else "train"
        metrics.write({"epoch": epoch, "phase": phase, "stderr": float("inf"), "mean": 1e300})
    with metrics.path.open("a") as file:
        file.write('{"epoch": 4, "pha')  # killed while writing
    row = {"epoch": 2, "phase": "eval", "mean": 1e300, "not_finite": ["stderr"]}
    assert metrics.rows("eval") == [row]
    assert len(metrics.rows()) == 4
    metrics.keep_until(1)
    assert [json.loads(line)["epoch"] for line in metrics.path.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_tracker_continues_the_run_of_its_folder_and_no_other(tmp_path, monkeypatch, name):
    """Two runs of one name in two folders are two runs. Trackio knows a run by its name only."""
    init = Mock()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, config={}))
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    for folder in ("a/run", "b/run", "a/run"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        Tracker(name, tmp_path / folder, "p", "r", {})
    calls = init.call_args_list
    first, other, again = (call.kwargs.get("id") or call.args[1] for call in calls)
    assert again == first != other
    assert calls[2].kwargs["resume"] == "allow"
    assert name == "trackio" or calls[0].kwargs.get("resume") is None


def test_trackios_step_is_the_epoch_and_each_picture_has_its_own_key(tmp_path, monkeypatch):
    run = Mock()
    package = SimpleNamespace(init=lambda *_, **__: run, Image=lambda image, caption: caption)
    monkeypatch.setitem(sys.modules, "trackio", package)
    tracker = Tracker("trackio", tmp_path, "p", "r", {})
    tracker.log({"train/loss": 1.5}, 4)
    tracker.log_images("eval/images", [(None, "a star"), (None, "a box")], 6)
    loss, images = run.log.call_args_list
    assert (loss.args, loss.kwargs) == (({"train/loss": 1.5},), {"step": 4})
    assert images.args == ({"eval/images/0": "a star", "eval/images/1": "a box"},)
    assert images.kwargs == {"step": 6}


# With the tracker's package behind this environment's own.
LOG = """
import sys
sys.path.append(sys.argv[1])
from pathlib import Path
from accelerate import PartialState
from PIL import Image
from paco_grpo.monitoring.trackers import Tracker
PartialState()
tracker = Tracker(sys.argv[2], Path(sys.argv[3]), "the-project", "r", {"seed": 1})
tracker.log({"reward/brightness_mean": 0.5}, 1)
images = [(Image.new("RGB", (8, 8), color), color) for color in ("red", "blue")]
tracker.log_images("eval/images", images, 1)
tracker.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_the_real_package_gets_the_numbers_and_pictures(tmp_path, name):
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", packages, name]
    subprocess.run(install, check=True)
    environment = os.environ | {f"{name.upper()}_MODE": "offline"}
    command = [sys.executable, "-c", LOG, packages, name, tmp_path, "--a.api_key=SECRET"]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=500, check=True)
    folder = tmp_path / name
    (log,) = folder.rglob(f"*.{name}")
    written = log.read_bytes()
    assert b"the-project" in written and b"reward/brightness_mean" in written
    for file in folder.rglob("*"):  # one has the command line
        assert not file.is_file() or b"SECRET" not in file.read_bytes()
    assert len(list(folder.rglob("*.png"))) == 2
