"""Weights are whole: models by the headers of their files, LoRA adapters when they are loaded."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from paco_judge.scorer import load_adapter
from paco_judge.weights import WrongWeights, from_pretrained_strict, main

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
K_PROJ = "model.language_model.layers.0.self_attn.k_proj.weight"


def changed(folder: Path, copy: Path, file: str, change: Callable[[dict], dict]) -> Path:
    """A copy of a folder with the weights that ``change`` returns."""
    shutil.copytree(folder, copy)
    save_file(change(load_file(copy / file)), copy / file, {"format": "pt"})
    return copy


def renamed(*replacements: tuple[str, str]) -> Callable[[dict], dict]:
    """A change of names by regular expressions, one after another."""

    def change(weights: dict) -> dict:
        for old, new in replacements:
            weights = {re.sub(old, new, name): value for name, value in weights.items()}
        return weights

    return change


def put(
    part: str, value: torch.Tensor | None, new_part: str | None = None
) -> Callable[[dict], dict]:
    """A change of the first tensor whose name holds ``part``; with ``new_part``, under a new name. None: removed."""

    def change(weights: dict) -> dict:
        name = next(name for name in weights if part in name)
        changed = weights | {name.replace(part, new_part or part): value}
        return {name: value for name, value in changed.items() if value is not None}

    return change


def test_whole_weights_pass_under_old_and_new_names(judge_dir, adapter_dir, tmp_path, capfd):
    """transformers' new names; folders, like the published ones of Qwen2.5-VL, have those of old."""
    assert any(name.startswith("visual.") for name in load_file(judge_dir / MODEL))
    old_names = renamed(
        ("model.language_model.", "model."), ("model.model.visual.", "model.visual.")
    )
    old_adapter = changed(adapter_dir, tmp_path / "tuned", ADAPTER, old_names)
    new_names = renamed((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual."))
    new = changed(judge_dir, tmp_path / "new", MODEL, new_names)
    assert main(str(judge_dir)) == main(str(new)) == 0
    assert capfd.readouterr().out == ""
    for base, adapter in ((judge_dir, old_adapter), (new, adapter_dir)):
        load_adapter(
            AutoModelForImageTextToText.from_pretrained(base), adapter
        )  # raises unless all of it is used


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        (MODEL, put("k_proj.weight", None), "lack 1 of the model's tensors: " + K_PROJ),
        (
            MODEL,
            put("k_proj.weight", torch.ones(3, 128)),
            K_PROJ + " is [3, 128] instead of [64, 128]",
        ),
        (ADAPTER, put("q_proj.lora_B", None), "q_proj.lora_B"),
        (ADAPTER, put("q_proj.lora_A", torch.ones(2, 9)), "2, 9"),
        (ADAPTER, put("q_proj.lora_A", torch.ones(2, 9), "x.lora_A"), "that its base lacks"),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    judge_dir, adapter_dir, tmp_path, capfd, file, change, problem
):
    folder = changed(
        judge_dir if file == MODEL else adapter_dir, tmp_path / "changed", file, change
    )
    with pytest.raises(WrongWeights, match=re.escape(problem)):
        if file == MODEL:
            assert main(str(folder)) == 1 and problem in capfd.readouterr().out
            from_pretrained_strict(AutoModelForImageTextToText, folder)
        else:
            load_adapter(AutoModelForImageTextToText.from_pretrained(judge_dir), folder)


def test_a_shard_that_a_download_left_out_is_named(judge_dir, tmp_path, capfd):
    folder = shutil.copytree(judge_dir, tmp_path / "judge", ignore=shutil.ignore_patterns(MODEL))
    index = {"metadata": {}, "weight_map": {K_PROJ: "model-00002-of-00002.safetensors"}}
    (folder / f"{MODEL}.index.json").write_text(json.dumps(index))
    assert main(str(folder)) == 1 and "model-00002-of-00002.safetensors" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"architectures": ["FutureVLForConditionalGeneration"]}, "FutureVL"),
    ],
)
def test_what_cannot_be_checked_is_said_not_refused(judge_dir, tmp_path, capfd, change, reason):
    folder = shutil.copytree(judge_dir, tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert main(str(folder)) == 3 and reason in capfd.readouterr().out
