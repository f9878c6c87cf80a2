"""Merging: the same scores, every file a server needs, and no incomplete exports."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from paco_judge.scorer import JudgeScorer
from paco_judge.weights import set_limits
from paco_reward.cli import main
from paco_reward.export import export, synthetic_pairs


@pytest.fixture
def arguments(judge_dir, adapter_dir, tmp_path) -> list[str]:
    options = {"--base": judge_dir, "--adapter": adapter_dir, "--output": tmp_path / "merged"}
    return ["export", *(str(word) for option in options.items() for word in option)]


def scores(*judge, count=12) -> list[float]:
    verdicts = JudgeScorer.from_pretrained(*judge).score(synthetic_pairs(count), top=None)
    return [verdict.p_yes for verdict in verdicts]


def test_export_command_reports_agreement(judge_dir, adapter_dir, arguments, tmp_path, capsys):
    assert main(arguments) == 0
    output = tmp_path / "merged"
    assert list(tmp_path.iterdir()) == [output]
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5
    merged = scores(output)
    np.testing.assert_allclose(merged, scores(judge_dir, adapter_dir), atol=1e-5)
    assert np.abs(np.subtract(merged, scores(judge_dir))).max() > 1e-3
    written = {"config.json", "generation_config.json", "model.safetensors"}
    for file in judge_dir.iterdir():
        copy = output / file.name
        assert file.name in written or copy.read_bytes() == file.read_bytes()

    assert main([*arguments[:-1], str(judge_dir)]) == 1  # an input is never overwritten


def test_the_image_limits_of_the_training_are_the_merged_models(judge_dir, adapter_dir, tmp_path):
    """The base's file has them under their old names, too, which win."""
    limits = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    base = shutil.copytree(judge_dir, tmp_path / "base")
    file = base / "processor_config.json"
    settings = json.loads(file.read_bytes())
    settings["image_processor"] |= {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    file.write_text(json.dumps(settings))
    adapter = shutil.copytree(adapter_dir, tmp_path / "adapter")
    processor = JudgeScorer.from_pretrained(judge_dir).processor
    assert dict(processor.image_processor.size) != limits
    set_limits(processor, limits)
    processor.save_pretrained(adapter)
    export(str(base), str(adapter), tmp_path / "merged")
    for judge in ((tmp_path / "merged",), (base, adapter)):
        size = JudgeScorer.from_pretrained(*judge).processor.image_processor.size
        assert {name: size[name] for name in limits} == limits


def test_a_judge_is_saved_as_its_base_is_stored(judge_dir, adapter_dir, tmp_path):
    """In bfloat16, and no changed weight is rounded twice."""
    base = shutil.copytree(judge_dir, tmp_path / "base")
    JudgeScorer.from_pretrained(judge_dir).model.to(torch.bfloat16).save_pretrained(base)
    assert export(str(base), str(adapter_dir), tmp_path / "merged") < 0.05
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "float32" not in (tmp_path / "merged" / "config.json").read_text()  # of its parts
    exact = JudgeScorer.from_pretrained(base, adapter_dir).model.merge_and_unload().state_dict()
    for name, tensor in JudgeScorer.from_pretrained(tmp_path / "merged").model.state_dict().items():
        assert torch.equal(tensor, exact[name].bfloat16().float()), name


def test_a_merged_model_with_other_scores_is_not_written(
    judge_dir, adapter_dir, tmp_path, capsys, monkeypatch, arguments
):
    """A merge that loses a strong adapter, which lowers P(Yes) by more than the limit."""
    strong = shutil.copytree(adapter_dir, tmp_path / "strong")
    weights = load_file(strong / "adapter_model.safetensors")
    for name in weights:
        weights[name] *= -20 if "lora_B" in name else 1
    save_file(weights, strong / "adapter_model.safetensors", {"format": "pt"})
    arguments[arguments.index(str(adapter_dir))] = str(strong)
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    lost = np.subtract(scores(judge_dir, strong, count=100), scores(judge_dir, count=100))
    assert main(arguments) == 1
    assert f"by up to {np.abs(lost).max():.3f}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [strong]


@pytest.mark.parametrize(("part", "value"), [("adapter", "-inf"), ("base", "nan")])
def test_weights_that_are_not_finite_are_one_sentence(
    judge_dir, adapter_dir, tmp_path, capsys, part, value
):
    """Of one number in the last tensor; nothing is left behind."""
    folders = {"base": judge_dir, "adapter": adapter_dir}
    folders[part] = shutil.copytree(folders[part], tmp_path / part)
    (file,) = folders[part].glob("*.safetensors")
    weights = load_file(file)
    name = max(weights)
    weights[name].view(-1)[3] = float(value)
    save_file(weights, file, {"format": "pt"})
    arguments = []
    for option, folder in (folders | {"output": tmp_path / "merged"}).items():
        arguments += [f"--{option}", str(folder)]
    assert main(["export", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert (f"1 of its {len(weights)} tensors ({name}" in message) == (part == "adapter")
    assert list(tmp_path.iterdir()) == [folders[part]]
