"""benchmarks/check_gpu.py on the CPU, on the pretended GPU, and with steps that fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import check_gpu
from gpu_checks.full_size import figures_of
from gpu_checks.steps import Deviates, Skipped, Step, run_steps

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT.parent / "tests" / "pretend_cuda.py"


def check(tmp_path: Path, *arguments: str, gpu: bool = False) -> tuple[int, str, dict]:
    paths = [ROOT, ROOT.parent / "PaCo-Reward" / "judge", ROOT.parent / "quickstart"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment["OMP_NUM_THREADS"] = "1"
    program = [str(GPU)] if gpu else []
    program += ["benchmarks/check_gpu.py", "--output", str(tmp_path / "check.json"), *arguments]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *program], timeout=580, check=False, **options)
    return done.returncode, done.stdout, json.loads((tmp_path / "check.json").read_text())


@pytest.mark.slow
def test_on_a_cpu_tiny_models_are_checked(tmp_path):
    status, shown, report = check(tmp_path, "--families", "flux", "qwen_image_edit")
    assert status == 0, shown
    names = [result["name"] for result in report["results"]]
    assert names[:2] == ["flux, float32", "qwen_image_edit, float32"]
    for result in report["results"]:
        assert result["status"] == "passed" and result["figures"]["deviation"] < 0.3
    assert report["results"][0]["figures"]["deviation"] == 0
    assert f"{len(names)} passed, 0 failed, 0 skipped" in shown


@pytest.mark.long
def test_on_a_pretended_gpu_tiny_models_are_checked(tmp_path):
    status, shown, report = check(tmp_path, "--toy", "--minutes", "9", gpu=True)
    results = {result["name"]: result for result in report["results"]}
    assert status == 0 and report["machine"]["gpus"] == ["Pretended GPU"], shown
    assert results["z_image, float32"]["figures"]["deviation"] < 1e-4
    assert results["flux, compiled"]["status"] == "passed"


def test_failures_are_told_and_the_rest_goes_on():
    def fail() -> dict:
        raise ValueError("wrong\nnumbers")

    def deviate() -> dict:
        raise Deviates("0.5 of it")

    def skip() -> dict:
        raise Skipped("not installed")

    steps = [
        Step("fails", 20, fail),
        Step("deviates", 20, deviate),
        Step("absent", 20, skip),
        Step("good", 20, lambda: {"images": 3}),
    ]
    results = list(run_steps(steps, time.monotonic() + 100))
    assert [result.status for result in results] == ["failed", "failed", "skipped", "passed"]
    assert results[0].message == "ValueError: wrong numbers"
    assert results[3].line().endswith("images 3")
    (late,) = run_steps(steps[:1], time.monotonic() + 1)
    assert (late.status, late.message) == ("skipped", "no time left")


def test_a_step_ends_at_its_limit(monkeypatch):
    monkeypatch.setattr("gpu_checks.steps.MIN_SECONDS", 0)
    step = Step("slow", 0.1, lambda: time.sleep(20))
    (result,) = run_steps([step], time.monotonic() + 100)
    assert result.status == "failed" and result.seconds < 10 and "not finished" in result.message


def test_a_row_for_the_docs():
    medians = {"sample_s": 8.0, "train_s": 4.0, "epoch_s": 16.0, "peak_gpu_gib": 44.0}
    metrics = {"train/ratio_deviation": 1e-6}
    report = {
        "samples": 16,
        "images_per_second": 1.0,
        "medians": medians,
        "epochs": [{"metrics": metrics}],
    }
    figures = figures_of(report) | {"predicted_gib": None}
    result = {"name": "t2is", "figures": figures}
    machine = {"gpus": ["H100"]}
    *_, row = check_gpu.markdown_rows({"machine": machine, "results": [result]})
    assert row == "| H100 | `t2is` | 2 | 4 | 1 | 44 | – | 1e-06 |"
