"""The row that a run prints for docs/evidence.md."""

import json

import yaml

from paco_grpo.commands.evidence import main

OPTIONS = {
    "pretrained": {"model": "some/FLUX"},
    "train": {"loss_type": "nft", "resolution": 320},
    "test": {"resolution": 640},
}


def write(run, rows):
    (run / "config.yaml").write_text(yaml.safe_dump(OPTIONS))
    (run / "plan.json").write_text(json.dumps({"num_processes": 3, "device": "NVIDIA H100"}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(consistency, clip):
    rewards = {"consistency_score": consistency, "subfig_clipT": clip}
    metrics = {f"eval/{name}_mean": mean for name, mean in rewards.items()}
    metrics |= {f"eval/{name}_stderr": mean / 10 for name, mean in rewards.items()}
    return {"phase": "eval"} | metrics


def test_a_run_is_one_row(tmp_path, capsys):
    epochs = [
        {"phase": "train", "time/epoch_s": seconds, "train_time": 3600 * hours}
        for seconds, hours in ((90, 0.5), (70, 1.1), (80, 2.25))
    ]
    write(tmp_path, [evaluation(0.4, 0.3), *epochs, evaluation(0.75, 0.25)])
    assert main([str(tmp_path)]) == 0
    _, trained, machine, _, seen, _ = capsys.readouterr().out.split("|")
    assert trained.strip() == "some/FLUX, `nft`, 320 → 640 px"
    assert machine.strip() == "3 × NVIDIA H100"
    assert seen.strip() == (
        "3 epochs in 2.2 h, median 80.0 s; consistency_score 0.400 → 0.750 ± 0.075; "
        "subfig_clipT 0.300 → 0.250 ± 0.025"
    )
