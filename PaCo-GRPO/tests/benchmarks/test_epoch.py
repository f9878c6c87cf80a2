"""benchmarks/epoch.py on a tiny model: it counts what the trainer computes, on a pretended GPU
too.
"""

import json
from pathlib import Path

import pytest

import epoch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = f"{ROOT}/config/grpo.py:t2is"
TINY = {
    "max_sequence_length": 24,
    "train.lora_rank": 4,
    "train.resolution": 64,
    "test.resolution": 64,
    "mixed_precision": "no",
    "sample.num_images_per_prompt": 2,
    "sample.num_steps": 3,
    "sample.unique_sample_num_per_epoch": 2,
    "sample.batch_size": 2,
}


@pytest.fixture
def measure(tiny_flux_dir, tmp_path, monkeypatch):
    """Status and report of epoch.py with ``arguments``."""
    monkeypatch.chdir(ROOT)
    # The program sets it where there is no GPU; other tests must not see that.
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    options = TINY | {"pretrained.model": tiny_flux_dir}
    command = ["--config", CONFIG, "--repeats", "1"]
    command += [f"--config.{name}={value}" for name, value in options.items()]

    def run(*arguments):
        output = tmp_path / "epoch.json"
        status = epoch.main([*command, "--output", str(output), *arguments])
        return status, json.loads(output.read_text())

    return run


def check_counts(report):
    medians = report["medians"]
    assert report["samples"] == 4 and medians["epoch_s"] > medians["sample_s"] > 0
    assert report["images"]["transformer"] == 4 * 3 + 4 and report["images"]["vae.decoder"] == 4


def test_phases_counts_and_profile(measure, capsys):
    status, report = measure("--profile")
    assert status == 0
    check_counts(report)
    assert report["operations"][0]["ms"] > 0
    assert "through transformer" in capsys.readouterr().out
    assert epoch.main(["--config", CONFIG, "--config.sample.merge_lra=on"]) == 2


@pytest.mark.slow
def test_on_a_pretended_gpu(measure, on, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with on("cuda"):
        status, report = measure()
    assert status == 0 and report["machine"]["gpus"] == ["Pretended GPU"]
    check_counts(report)
    assert "peak_gpu_gib" in report["medians"]
