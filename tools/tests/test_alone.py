"""Each subproject installs alone in an empty environment, by the command of its published guide, and then works.

`pip install` is `uv pip install` here: the same arguments and build backends, and today's newest versions.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1500)]


def run(command: list, cwd: Path, **variables: str) -> str:
    """The command's output; its end is shown where it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PYTHONFAULTHANDLER"] = "1"  # a crash names its place
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=clean | variables, check=False, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    # The end last and short: it tells the reason, and reports of a failure are cut.
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{done.stdout[-1200:]}"
    return done.stdout


@pytest.fixture
def place(tmp_path):
    """(a copy of the files that git knows, the interpreter of an empty environment with pip, setuptools and wheel, `pip install`).

    That is what `conda create` and `python -m venv` of Python 3.11 give. The copy shows that nothing untracked is needed,
    and keeps build leftovers out of the repository. Both are removed afterwards: an environment takes gigabytes.
    """
    copy = tmp_path / "clone"
    run(["git", "clone", "-q", "--depth", "1", f"file://{REPO}", copy], tmp_path)
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    run([uv, "venv", "-q", "--seed", "--python", sys.executable, tmp_path / "env"], tmp_path)
    python = tmp_path / "env" / "bin" / "python"

    def pip(arguments: list[str], folder: Path) -> None:
        # Without our constraints: what a user who follows the guide gets is what has to work.
        certificates = {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
        index = {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
        run([uv, "pip", "install", "-q", "--python", python, *arguments], folder, **certificates, **index)

    pip(["setuptools", "wheel"], tmp_path)
    yield copy, python, pip
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_paco_reward(place):
    copy, python, pip = place
    folder = copy / "PaCo-Reward" / "LLaMA-Factory"
    pip(["-e", ".[torch,metrics]", "--no-build-isolation"], folder)
    run([python, "-m", "pip", "check"], folder)
    assert "build-dataset" in run([python.with_name("paco-reward"), "--help"], copy)
    run([python, "-c", "import paco_judge.client, paco_reward.overlay, scipy, torchvision"], copy)


def test_paco_grpo(place, tmp_path):
    copy, python, pip = place
    folder = copy / "PaCo-GRPO"
    pip(["-e", "."], folder)
    run([python, "-m", "pip", "check"], copy)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    made = tmp_path / "made"
    variables = {
        "VIRTUAL_ENV": str(python.parents[1]), "PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
        "VLLM_ENGINE": "transformers", "VLLM_PORT": port, "VLLM_LABEL": "alone", "PACO_RUNTIME_DIR": str(tmp_path / "run"),
        "VLLM_MODEL_PATHS": f"{made}/judge,{made}/judge", "VLLM_MODEL_NAMES": "Paco-Reward-7B,Gemma-3-4B-IT",
    }  # fmt: skip

    def bash(*words: str) -> str:
        return run(["bash", *words], folder, **variables)

    def rewards(*words: str) -> str:
        script = REPO / "tools" / "tests" / "alone_grpo.py"
        return run([python, script, *words], folder, PYTHONPATH="tests", HF_HUB_OFFLINE="1")

    rewards("prepare", made)
    bash("vllm_server/launch.sh")  # two models: through the gateway
    try:
        assert "ocr 1.000" in rewards("score", made, port)

        clip = {"pickscore": {"model": f"{made}/clip", "processor": f"{made}/clip"}, "subfig_clipT": {"model": f"local-dir:{made}/open_clip"}}
        options = {
            "pretrained.model": "../quickstart/models/flux", "run_name": "t2is", "mixed_precision": "no", "max_sequence_length": 32,
            "train.resolution": 64, "test.resolution": 64, "num_epochs": 1, "sample.num_images_per_prompt": 2,
            "sample.unique_sample_num_per_epoch": 2, "test.num_steps": 2, "test.num_images": 1,
            "train.reward_fn_kwargs": clip | {"consistency_score": {"port": int(port), "model": "Paco-Reward-7B"}},
        }  # fmt: skip
        bash("scripts/single_node/train_flux.sh", "t2is", *(f"--config.{key}={value}" for key, value in options.items()))
        rows = map(json.loads, (folder / "runs" / "t2is" / "metrics.jsonl").read_text().splitlines())
        (row,) = (row for row in rows if row["phase"] == "train")
        assert row["reward/missing_share"] == 0 and {f"reward/{name}_mean" for name in ("consistency_score", *clip)} <= set(row)
        bash("-c", "python -m paco_grpo.report runs/t2is")
    finally:
        bash("vllm_server/stop.sh")
