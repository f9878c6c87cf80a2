"""Merging: the same scores, every file a server needs, and no incomplete exports."""

import shutil

import numpy as np
import pytest

from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main
from paco_reward.export import synthetic_pairs


def scores(*judge):
    return np.array([v.p_yes for v in JudgeScorer.from_pretrained(*judge).score(synthetic_pairs(12))])


def test_export_command_reports_agreement(judge_dir, adapter_dir, tmp_path, capsys):
    output = tmp_path / "merged"
    arguments = ["export", "--base", str(judge_dir), "--adapter", str(adapter_dir), "--output", str(output)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "largest score difference before/after on 100 pairs" in said
    assert float(said.split()[-1]) < 1e-5
    merged, before, base = scores(output), scores(judge_dir, adapter_dir), scores(judge_dir)
    np.testing.assert_allclose(merged, before, atol=1e-5)
    assert np.abs(merged - base).max() > 1e-3
    files = {file.name for file in output.iterdir()}
    kept = {file.name for file in judge_dir.iterdir()} - {"config.json", "generation_config.json", "model.safetensors"}
    assert kept <= files and {"config.json", "model.safetensors", "chat_template.jinja"} <= files
    for name in kept:
        assert (output / name).read_bytes() == (judge_dir / name).read_bytes()

    assert main(arguments) == 1  # not empty
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force", "--dtype", "bfloat16"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}


@pytest.mark.parametrize("place", ["adapter", "base", "parent", "inside"])
def test_an_output_that_overlaps_with_an_input_is_refused(judge_dir, adapter_dir, tmp_path, capsys, place):
    """With --force, the output replaces what is in its folder."""
    base = shutil.copytree(judge_dir, tmp_path / "models" / "judge")
    adapter = shutil.copytree(adapter_dir, tmp_path / "lora")
    output = {"adapter": adapter, "base": base, "parent": base.parent, "inside": adapter / "merged"}[place]
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", "--base", str(base), "--adapter", str(adapter), "--output", str(output), "--force"]) == 1
    assert str(output) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merged_model_with_other_scores_is_not_written(judge_dir, adapter_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paco_reward.export.largest_difference", lambda *_: 0.996)
    partial, output = tmp_path / "out.partial", tmp_path / "out"
    partial.mkdir()
    output.mkdir()
    (output / "mine.txt").write_text("kept")
    assert main(["export", "--base", str(judge_dir), "--adapter", str(adapter_dir), "--output", str(output), "--force"]) == 1
    assert "0.996" in capsys.readouterr().err
    assert (output / "mine.txt").exists() and partial.is_dir() and len(list(tmp_path.iterdir())) == 2
