"""Merging: the same scores, every file a server needs, and no incomplete exports."""

import numpy as np

from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main
from paco_reward.export import synthetic_pairs


def scores(*judge):
    return np.array(
        [v.p_yes for v in JudgeScorer.from_pretrained(*judge).score(synthetic_pairs(12))]
    )


def test_export_command_reports_agreement(judge_dir, adapter_dir, tmp_path, capsys):
    output = tmp_path / "merged"
    arguments = [
        "export",
        "--base",
        str(judge_dir),
        "--adapter",
        str(adapter_dir),
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert float(printed.split()[-1]) < 1e-5
    merged, before, base = scores(output), scores(judge_dir, adapter_dir), scores(judge_dir)
    np.testing.assert_allclose(merged, before, atol=1e-5)
    assert np.abs(merged - base).max() > 1e-3
    files = {file.name for file in output.iterdir()}
    kept = {file.name for file in judge_dir.iterdir()} - {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert kept <= files and {"config.json", "model.safetensors", "chat_template.jinja"} <= files
    for name in kept:
        assert (output / name).read_bytes() == (judge_dir / name).read_bytes()

    for place in (
        output,
        judge_dir,
        adapter_dir,
        judge_dir.parent,
    ):  # an input is never overwritten
        assert main([*arguments[:-1], str(place)]) == 1
        assert str(place) in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}


def test_a_merged_model_with_other_scores_is_not_written(
    judge_dir, adapter_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("paco_reward.export.LARGEST_DIFFERENCE", -1)
    arguments = [
        "--base",
        str(judge_dir),
        "--adapter",
        str(adapter_dir),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(["export", *arguments]) == 1
    assert "by up to" in capsys.readouterr().err and not any(tmp_path.iterdir())
