"""Merging: the same scores, every file a server needs, and no incomplete exports."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main
from paco_reward.export import export, synthetic_pairs


def scores(*judge):
    verdicts = JudgeScorer.from_pretrained(*judge).score(synthetic_pairs(12))
    return np.array([verdict.p_yes for verdict in verdicts])


@pytest.fixture
def arguments(judge_dir, adapter_dir, tmp_path) -> list[str]:
    options = {"--base": judge_dir, "--adapter": adapter_dir, "--output": tmp_path / "merged"}
    return ["export", *(str(word) for option in options.items() for word in option)]


def test_export_command_reports_agreement(judge_dir, adapter_dir, arguments, tmp_path, capsys):
    output = tmp_path / "merged"
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert float(printed.split()[-1]) < 1e-5
    merged = scores(output)
    before = scores(judge_dir, adapter_dir)
    base = scores(judge_dir)
    np.testing.assert_allclose(merged, before, atol=1e-5)
    assert np.abs(merged - base).max() > 1e-3
    files = {file.name for file in output.iterdir()}
    written = {"config.json", "generation_config.json", "model.safetensors"}
    kept = {file.name for file in judge_dir.iterdir()} - written
    assert kept <= files and {"config.json", "model.safetensors", "chat_template.jinja"} <= files
    for name in kept:
        assert (output / name).read_bytes() == (judge_dir / name).read_bytes()

    # An input is never overwritten.
    for place in (output, judge_dir, adapter_dir, judge_dir.parent):
        assert main([*arguments[:-1], str(place)]) == 1
        assert str(place) in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}


def test_a_judge_is_saved_as_its_base_is_stored(judge_dir, adapter_dir, tmp_path):
    """The merge is in float32, the file in bfloat16: half as large."""
    base = tmp_path / "base"
    judge = JudgeScorer.from_pretrained(judge_dir)
    judge.model.to(torch.bfloat16).save_pretrained(base)
    judge.processor.save_pretrained(base)
    assert export(str(base), str(adapter_dir), tmp_path / "merged") < 0.05
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert '"dtype": "bfloat16"' in (tmp_path / "merged" / "config.json").read_text()
    exact = JudgeScorer.from_pretrained(base, adapter_dir).model.merge_and_unload().state_dict()
    # Rounded once: a merge in bfloat16 would round the sum of rounded numbers.
    for name, tensor in JudgeScorer.from_pretrained(tmp_path / "merged").model.state_dict().items():
        assert torch.equal(tensor, exact[name].bfloat16().float()), name


def test_a_merged_model_with_other_scores_is_not_written(
    judge_dir, adapter_dir, tmp_path, capsys, monkeypatch, arguments
):
    """A merge that loses a strong adapter, which changes P(Yes) by more than the limit."""
    strong = shutil.copytree(adapter_dir, tmp_path / "strong")
    weights = load_file(strong / "adapter_model.safetensors")
    for name, tensor in weights.items():
        if "lora_B" in name:
            weights[name] = tensor * 20
    save_file(weights, strong / "adapter_model.safetensors", {"format": "pt"})
    arguments[arguments.index(str(adapter_dir))] = str(strong)
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    assert main(arguments) == 1
    assert "by up to" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"strong"}


def test_a_judge_that_was_merged_with_its_adapter_is_warned_of(
    arguments, judge_dir, adapter_dir, tmp_path, caplog
):
    """The adapter would be applied twice, and both sides of the comparison would agree."""
    own = shutil.copytree(adapter_dir, tmp_path / "own")
    settings = json.loads((own / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(judge_dir)
    (own / "adapter_config.json").write_text(json.dumps(settings))
    arguments[arguments.index(str(adapter_dir))] = str(own)

    def warnings(arguments):
        caplog.clear()
        assert main(arguments) == 0
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    assert not warnings(arguments)
    again = ["export", "--base", str(tmp_path / "merged"), "--adapter", str(own)]
    told = warnings([*again, "--output", str(tmp_path / "twice")])
    assert any(str(judge_dir) in message for message in told)


@pytest.mark.parametrize("damage", ["none", "zero", "shape"])
def test_an_adapter_that_changes_nothing_or_does_not_fit_is_said(
    damage, adapter_dir, tmp_path, arguments, caplog, capsys
):
    odd = shutil.copytree(adapter_dir, tmp_path / "odd")
    weights = load_file(odd / "adapter_model.safetensors")
    for name, tensor in weights.items():
        if "lora_B" in name and damage == "zero":
            weights[name] = torch.zeros_like(tensor)
        if "lora_B" in name and damage == "shape":
            weights[name] = tensor[:3].clone()
    if damage == "none":
        weights = {}
    save_file(weights, odd / "adapter_model.safetensors", {"format": "pt"})
    arguments[arguments.index(str(adapter_dir))] = str(odd)
    status = main(arguments)
    said = caplog.text + capsys.readouterr().err
    assert status == (0 if damage == "zero" else 1)
    expected = {"none": "has no tensors", "zero": "changes nothing", "shape": "does not fit"}
    assert expected[damage] in said
    assert (tmp_path / "merged").exists() == (damage == "zero")


def test_missing_inputs_are_one_line(arguments, capsys):
    for option in ("--base", "--adapter"):
        wrong = list(arguments)
        wrong[wrong.index(option) + 1] = "nowhere/at/all"
        assert main(wrong) == 1
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith("error: ") and "nowhere/at/all" in line


def test_no_room_is_found_before_the_merge(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(9 << 30, 9 << 30, 1 << 20)
    )
    assert main(arguments) == 1
    assert "has 1 MiB free, but about 4 MiB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def start(arguments: list[str], before: str = "") -> psutil.Popen:
    command = f"{before} exec {sys.executable} -m paco_reward.cli {' '.join(arguments)}"
    return psutil.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line(arguments, tmp_path):
    exporting = start(arguments, "ulimit -f 500;")  # KiB: fails where a full disk would
    _, errors = exporting.communicate(timeout=120)
    assert exporting.returncode == 1 and "free some space" in errors.splitlines()[-1]
    assert "Traceback" not in errors and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_stopped_export_leaves_no_half_model(sent, status, arguments, tmp_path, capsys):
    work = tmp_path / ".merged.export"
    exporting = start(arguments)
    while not (work / "merged" / "model.safetensors").exists():
        assert exporting.poll() is None, exporting.stderr.read()
        time.sleep(0.02)
    exporting.suspend()  # or it may end while the second export starts
    assert main(arguments) == 1
    assert f"in use by process {exporting.pid} on" in capsys.readouterr().err
    exporting.send_signal(sent)
    if sent != signal.SIGKILL:
        exporting.resume()
    exporting.wait(60)
    assert exporting.returncode == status
    left = {work} if sent == signal.SIGKILL else set()
    assert set(tmp_path.iterdir()) == left
    # What a kill left does not disturb the next export, which takes it away.
    assert main(arguments) == 0
    assert set(tmp_path.iterdir()) == {Path(tmp_path, "merged")}
