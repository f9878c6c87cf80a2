"""benchmarks/epoch.py on a tiny model: it counts what the trainer computes."""

import json
from pathlib import Path

import epoch

ROOT = Path(__file__).resolve().parents[2]


def test_phases_counts_and_profile(tiny_flux_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "epoch.json"
    options = {
        "pretrained.model": tiny_flux_dir, "max_sequence_length": 24, "train.lora_rank": 4, "train.resolution": 64,
        "test.resolution": 64, "mixed_precision": "no", "sample.num_images_per_prompt": 2, "sample.num_steps": 3,
        "sample.unique_sample_num_per_epoch": 2, "sample.batch_size": 2,
    }  # fmt: skip
    given = [f"--config.{name}={value}" for name, value in options.items()]
    config = f"{ROOT}/config/grpo.py:t2is"
    status = epoch.main(
        ["--config", config, *given, "--repeats", "1", "--profile", "--output", str(output)]
    )
    assert status == 0
    found = json.loads(output.read_text())
    assert found["samples"] == 4 and found["medians"]["epoch_s"] > found["medians"]["sample_s"] > 0
    assert found["images"]["transformer"] == 4 * 3 + 4 and found["images"]["vae.decoder"] == 4
    assert found["operations"][0]["ms"] > 0
    assert "through transformer" in capsys.readouterr().out
    assert epoch.main(["--config", config, "--config.sample.merge_lra=on"]) == 2
