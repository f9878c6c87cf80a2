"""benchmarks/epoch.py on a tiny model."""

import json
from pathlib import Path

import pytest

import epoch

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "max_sequence_length": 24,
    "train.lora_rank": 4,
    "train.resolution": 64,
    "mixed_precision": "no",
    "sample.num_images_per_prompt": 2,
    "sample.num_steps": 3,
    "sample.unique_sample_num_per_epoch": 3,
    "sample.batch_size": 2,
}


def test_the_phases_are_those_of_the_metrics(tiny_flux_dir, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options = TINY | {"pretrained.model": tiny_flux_dir}
    command = ["--config", f"{ROOT}/config/grpo.py:t2is", "--repeats", "1"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    assert epoch.main(command) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["time/epoch_s"] > figures["time/sample_s"] > 0
    assert figures["images_per_second"] * figures["time/epoch_s"] == pytest.approx(6)
    assert epoch.main([*command, "--config.sample.merge_lra=on"]) == 1
