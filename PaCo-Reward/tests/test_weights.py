"""Weights are whole: models by the headers of their files, LoRA adapters by their tensors."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from paco_judge.weights import from_pretrained_strict, main

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
K_PROJ = "model.language_model.layers.0.self_attn.k_proj.weight"


def changed(folder: Path, copy: Path, file: str, change: Callable[[dict], object]) -> Path:
    """A copy of a folder with weights that ``change`` has changed in place, or has returned."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / file)
    result = change(weights)
    save_file(result if isinstance(result, dict) else weights, copy / file, {"format": "pt"})
    return copy


def new_names(weights: dict) -> dict:
    """The names that transformers uses now; folders, like the published ones of Qwen2.5-VL, have those of old."""
    return {
        re.sub(r"^visual\.", "model.visual.", re.sub(r"^model\.", "model.language_model.", name)): value
        for name, value in weights.items()
    }


def old_names(weights: dict) -> dict:
    """An adapter's names when models had the names of the published folders."""
    return {
        name.replace("model.language_model.", "model.").replace("model.model.visual.", "model.visual."): value
        for name, value in weights.items()
    }


def put(part: str, value: torch.Tensor, new_part: str | None = None) -> Callable[[dict], None]:
    """A change of the first tensor whose name holds ``part``; with ``new_part``, under a new name."""

    def change(weights: dict) -> None:
        name = next(name for name in weights if part in name)
        weights[name.replace(part, new_part or part)] = value

    return change


def without(part: str) -> Callable[[dict], object]:
    return lambda weights: weights.pop(next(name for name in weights if part in name))


def test_whole_weights_pass_under_old_and_new_names(judge_dir, adapter_dir, tmp_path, capfd):
    assert any(name.startswith("visual.") for name in load_file(judge_dir / MODEL))
    old_adapter = changed(adapter_dir, tmp_path / "tuned", ADAPTER, old_names)
    assert main(str(judge_dir), str(adapter_dir), str(old_adapter)) == 0
    new = changed(judge_dir, tmp_path / "new", MODEL, new_names)
    assert main(str(new), str(adapter_dir)) == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (MODEL, without("k_proj.weight"), "lack 1 of the model's tensors: " + K_PROJ),
        (MODEL, put("k_proj.weight", torch.ones(3, 128)), K_PROJ + " is 3x128 instead of 64x128"),
        (ADAPTER, without("q_proj.lora_B"), "q_proj.weight is"),
        (ADAPTER, put("q_proj.lora_A", torch.ones(2, 9)), "2x9"),
        (ADAPTER, put("q_proj.lora_A", torch.ones(2, 9), "x.lora_A"), "that its base lacks"),
        (ADAPTER, put("q_proj.lora_A", torch.full((4, 64), torch.inf)), "not finite"),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(judge_dir, adapter_dir, tmp_path, capfd, file, change, said):
    folder = changed(judge_dir if file == MODEL else adapter_dir, tmp_path / "changed", file, change)
    assert main(*map(str, [folder] if file == MODEL else [judge_dir, folder])) == 1
    output = capfd.readouterr().out
    assert said in output and output.count("\n") == 1
    if file == MODEL:
        with pytest.raises(ValueError, match=said):
            from_pretrained_strict(AutoModelForImageTextToText, folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["FutureVLForConditionalGeneration"]}, "FutureVL"),
    ],
)
def test_what_cannot_be_checked_is_said_not_refused(judge_dir, tmp_path, capfd, change, reason):
    folder = shutil.copytree(judge_dir, tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert main(str(folder)) == 3 and reason in capfd.readouterr().out
