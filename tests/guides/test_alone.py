"""Each subproject installs alone in an empty environment, by its guide's command (with uv for pip), and then works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import free_port
from terminal import REPOSITORY, TOY_SIZE

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1500)]


def run(command: list, cwd: Path, **variables: str) -> str:
    clean = {
        k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    }
    clean["PYTHONFAULTHANDLER"] = "1"  # a crash names its place
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=clean | variables, check=False, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, (
        f"{command} ended with status {done.returncode}:\n{done.stdout[-1200:]}"
    )
    return done.stdout


@pytest.fixture
def place(tmp_path):
    """(a clone, the interpreter of an empty environment as `conda create` makes it, `pip install`)."""
    copy = tmp_path / "clone"
    run(["git", "clone", "-q", "--depth", "1", f"file://{REPOSITORY}", copy], tmp_path)
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    run([uv, "venv", "-q", "--seed", "--python", sys.executable, tmp_path / "env"], tmp_path)
    python = tmp_path / "env" / "bin" / "python"

    def pip(arguments: list[str], folder: Path) -> None:
        # Without our constraints, as for a user who follows the guide.
        names = {"SSL_CERT_FILE": "PIP_CERT", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}
        variables = {name: os.environ[own] for name, own in names.items() if own in os.environ}
        run([uv, "pip", "install", "-q", "--python", python, *arguments], folder, **variables)

    pip(["setuptools", "wheel"], tmp_path)
    yield copy, python, pip
    shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes


def test_paco_reward(place):
    copy, python, pip = place
    folder = copy / "PaCo-Reward" / "LLaMA-Factory"
    pip(["-e", ".[torch,metrics]", "--no-build-isolation"], folder)
    run([python, "-m", "pip", "check"], folder)
    assert "build-dataset" in run([python.with_name("paco-reward"), "--help"], copy)
    run([python, "-c", "import paco_judge.client, paco_reward.overlay, scipy, torchvision"], copy)


def test_paco_grpo(place, published, open_clip, tmp_path):
    copy, python, pip = place
    folder, port = copy / "PaCo-GRPO", free_port()
    judge, clip = published["X-GenGroup/PaCo-Reward-7B"], published["yuvalkirstain/PickScore_v1"]
    pip(["-e", "."], folder)
    run([python, "-m", "pip", "check"], copy)
    variables = {
        "VIRTUAL_ENV": str(python.parents[1]), "PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
        "VLLM_ENGINE": "transformers", "VLLM_PORT": str(port), "VLLM_LABEL": "alone", "PACO_RUNTIME_DIR": str(tmp_path / "run"),
        "VLLM_MODEL_PATHS": f"{judge},{judge}", "VLLM_MODEL_NAMES": "Paco-Reward-7B,Gemma-3-4B-IT",
    }  # fmt: skip

    def bash(*words: str) -> str:
        return run(["bash", *words], folder, **variables)

    bash("vllm_server/launch.sh")  # two models: through the gateway
    try:
        scores = run(
            [python, Path(__file__).with_name("alone_grpo.py"), port, clip, open_clip],
            folder,
            HF_HUB_OFFLINE="1",
        )
        assert "ocr 1.000" in scores

        clips = {
            "pickscore": {"model": str(clip), "processor": str(clip)},
            "subfig_clipT": {"model": open_clip},
        }
        options = TOY_SIZE | {
            "pretrained.model": "../quickstart/models/flux", "run_name": "t2is", "max_sequence_length": 32,
            "train.reward_fn_kwargs": clips | {"consistency_score": {"port": port, "model": "Paco-Reward-7B"}},
        }  # fmt: skip
        bash(
            "scripts/single_node/train_flux.sh",
            "t2is",
            *(f"--config.{key}={value}" for key, value in options.items()),
        )
        rows = map(
            json.loads, (folder / "runs" / "t2is" / "metrics.jsonl").read_text().splitlines()
        )
        (row,) = (row for row in rows if row["phase"] == "train")
        assert row["reward/missing_share"] == 0
        assert {f"reward/{name}_mean" for name in ("consistency_score", *clips)} <= set(row)
        bash("-c", "python -m paco_grpo.report runs/t2is")
    finally:
        bash("vllm_server/stop.sh")
