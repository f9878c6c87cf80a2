"""Merging: the same scores, every file a server needs, and no incomplete exports."""

import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from paco_judge.scorer import JudgeScorer, set_limits
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


def test_the_image_limits_of_the_training_are_the_merged_models(judge_dir, adapter_dir, tmp_path):
    limits = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    adapter = shutil.copytree(adapter_dir, tmp_path / "adapter")
    processor = JudgeScorer.from_pretrained(judge_dir).processor
    assert dict(processor.image_processor.size) != limits
    set_limits(processor, limits)
    processor.save_pretrained(adapter)
    export(str(judge_dir), str(adapter), tmp_path / "merged")
    merged = JudgeScorer.from_pretrained(tmp_path / "merged").processor
    assert {name: merged.image_processor.size[name] for name in limits} == limits
    judging = JudgeScorer.from_pretrained(judge_dir, adapter).processor
    assert {name: judging.image_processor.size[name] for name in limits} == limits


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


@pytest.mark.slow
def test_a_killed_export_leaves_no_model_and_the_next_one_is_whole(arguments, tmp_path):
    work = tmp_path / ".merged.export"
    exporting = subprocess.Popen([sys.executable, "-m", "paco_reward.cli", *arguments])
    while not (work / "model.safetensors").exists():
        assert exporting.poll() is None
        time.sleep(0.02)
    exporting.kill()
    exporting.wait()
    assert set(tmp_path.iterdir()) == {work}
    assert main(arguments) == 0
    assert set(tmp_path.iterdir()) == {tmp_path / "merged"}
