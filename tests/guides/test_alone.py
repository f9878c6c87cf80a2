"""Each subproject installs alone in an empty environment, by its guide's command, and then works.

uv takes pip's place.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_judge
from fakes import free_port
from terminal import REPOSITORY, TOY_JUDGE

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


# pip's and uv's settings of this machine, and our pins, are not a user's.
NOT_A_USERS = ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_", "UV_")

MIRRORS = {"SSL_CERT_FILE": "PIP_CERT", "UV_DEFAULT_INDEX": "PIP_INDEX_URL"}

# What the tests need beside the packages.
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "imagehash"]

# Of packages with their submodules, and of modules.
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for part in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(part.name)
"""


def run(command: list, cwd: Path, **variables: str) -> str:
    environment = {"PYTHONFAULTHANDLER": "1"}  # a crash names its place
    for name, value in os.environ.items():
        if not name.startswith(NOT_A_USERS):
            environment[name] = value
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment | variables,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout[-1200:]}"
    return done.stdout


@pytest.fixture
def place(tmp_path):
    """(a clone, the interpreter of an empty environment, which has not even setuptools, `pip`)."""
    copy = tmp_path / "clone"
    run(["git", "clone", "-q", "--depth", "1", f"file://{REPOSITORY}", copy], tmp_path)
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "env"], tmp_path)
    python = tmp_path / "env" / "bin" / "python"

    def pip(command: str, arguments: list[str], folder: Path) -> None:
        variables = {"UV_NO_CONFIG": "1"}
        for name, pips_name in MIRRORS.items():
            if value := os.environ.get(name, os.environ.get(pips_name)):
                variables[name] = value
        run([uv, "pip", command, "-q", "--python", python, *arguments], folder, **variables)

    yield copy, python, pip
    shutil.rmtree(tmp_path, ignore_errors=True)  # gigabytes


def activated(python: Path) -> dict[str, str]:
    path = f"{python.parent}:{os.environ['PATH']}"
    return {"VIRTUAL_ENV": str(python.parents[1]), "PATH": path, "HF_HUB_OFFLINE": "1"}


def test_paco_reward(place):
    """Without pins, torch and torchaudio fit each other: LLaMA-Factory imports both."""
    copy, python, pip = place
    folder = copy / "PaCo-Reward"
    pip("install", ["-e", ".[torch,metrics]", "--no-build-isolation"], folder / "LLaMA-Factory")
    pip("check", [], folder)
    assert "build-dataset" in run([python.with_name("paco-reward"), "--help"], copy)
    data = tiny_judge.save_pairs(
        copy / "quickstart/out/world/reward_data", 8, "toy_pairs_cot_train"
    )
    words = [f"{name}={str(value).lower()}" for name, value in TOY_JUDGE.items()]
    words += [f"dataset_dir={data}", f"output_dir={copy / 'judge'}"]
    train = ["bash", "train/paco_reward.sh", "config/toy_reward_lora.yaml", *words]
    run(train, folder, **activated(python))
    assert (copy / "judge" / "adapter_model.safetensors").exists()


def test_paco_grpo(place, published, open_clip, tmp_path):
    copy, python, pip = place
    folder = copy / "PaCo-GRPO"
    port = free_port()
    judge = published["X-GenGroup/PaCo-Reward-7B"]
    clip = published["yuvalkirstain/PickScore_v1"]
    pip("install", ["-e", "."], folder)
    pip("check", [], folder)
    variables = activated(python) | {
        "VLLM_ENGINE": "transformers",
        "VLLM_PORT": str(port),
        "VLLM_LABEL": "alone",
        "PACO_RUNTIME_DIR": str(tmp_path / "run"),
        "VLLM_MODEL_PATHS": f"{judge},{judge}",
        "VLLM_MODEL_NAMES": "Paco-Reward-7B,Gemma-3-4B-IT",
    }

    def bash(*words: str) -> str:
        return run(["bash", *words], folder, **variables)

    bash("vllm_server/launch.sh")  # two models: through the gateway
    try:
        score = [python, Path(__file__).with_name("alone_grpo.py"), port, clip, open_clip]
        assert "ocr 1.000" in run(score, folder, HF_HUB_OFFLINE="1")
    finally:
        bash("vllm_server/stop.sh")
    page = (folder / "README.md").read_text()
    (first_run,) = re.findall(
        r"^bash scripts/\S+ toy_t2is.*?[^\\]$", page, re.DOTALL | re.MULTILINE
    )
    # As printed, it runs in test_readmes.py.
    bash("-c", f"{first_run} --config.num_epochs=1 --config.test.num_images=1")
    bash("-c", "python -m paco_grpo.report runs/first")


@pytest.mark.parametrize(
    "requirements, modules, tests",
    [
        pytest.param(
            ["-e", "PaCo-GRPO[quantize]", "-e", "PaCo-Reward/judge[scorer]", "-e", "quickstart"],
            ["paco_grpo", "paco_judge", "paco_toy.report", "paco_toy.summary"],
            [
                "PaCo-GRPO/tests/policies",
                "PaCo-GRPO/tests/objectives",
                "PaCo-GRPO/tests/report",
                "PaCo-GRPO/tests/training/test_update.py",
                "PaCo-GRPO/tests/training/test_whole_run.py",
                "quickstart/tests/test_summary.py",
            ],
            id="PaCo-GRPO",
        ),
        pytest.param(
            [
                *["-e", "PaCo-Reward/LLaMA-Factory[torch,metrics]"],
                *["-r", "PaCo-Reward/evaluation/requirements.txt"],
            ],
            ["paco_reward", "paco_judge", "llamafactory.data.mm_plugin", "gradio.blocks"],
            [
                "PaCo-Reward/judge/tests/test_scorer.py",
                "PaCo-Reward/tests/test_loss.py",
                "PaCo-Reward/tests/test_overlay.py",
                "PaCo-Reward/tests/test_bench_road.py",
                "PaCo-Reward/tests/test_pairing_rules.py",
            ],
            id="PaCo-Reward",
        ),
    ],
)
def test_oldest_versions(place, requirements, modules, tests):
    """Lower bounds name versions that work."""
    copy, python, pip = place
    pip("install", ["--resolution", "lowest-direct", *requirements], copy)
    run([python, "-c", IMPORT_ALL, *modules], copy)
    pip("install", TOOLS, copy)
    options = ["-q", "-p", "no:cacheprovider", "--show-capture=no", "-m", "not slow and not long"]
    # docs/pipelines.md is about the pinned diffusers.
    options += ["--ignore", "PaCo-GRPO/tests/policies/test_pipelines_page.py"]
    run([python, "-m", "pytest", *options, *tests], copy, OMP_NUM_THREADS="1")
