"""Weights are whole when they are loaded: models, and LoRA adapters on them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from paco_judge.errors import UserError
from paco_judge.scorer import load_adapter
from paco_judge.weights import from_pretrained_strict

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
K_PROJ = "model.language_model.layers.0.self_attn.k_proj.weight"


def changed(folder: Path, copy: Path, change: Callable[[dict], dict]) -> Path:
    """A copy of a folder with the weights that ``change`` returns."""
    shutil.copytree(folder, copy)
    file = copy / (ADAPTER if (copy / ADAPTER).exists() else MODEL)
    save_file(change(load_file(file)), file, {"format": "pt"})
    return copy


def renamed(old: str, new: str) -> Callable[[dict], dict]:
    """A change of names by a regular expression."""
    return lambda weights: {re.sub(old, new, name): value for name, value in weights.items()}


def first(weights: dict, part: str) -> str:
    return next(name for name in weights if part in name)


def base(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder)


def test_adapters_load_under_old_and_new_names(judge_dir, adapter_dir, tmp_path):
    """The base as transformers saves it, and with the names of the published Qwen2.5-VL."""
    published = changed(judge_dir, tmp_path / "old", renamed(r"^model\.visual\.", "visual."))
    old_names = renamed(r"model\.(language_model\.|model\.(?=visual))", "model.")
    old_adapter = changed(adapter_dir, tmp_path / "tuned", old_names)
    for folder in (judge_dir, published):
        load_adapter(base(folder), old_adapter)
        load_adapter(base(folder), adapter_dir)


def test_an_adapter_says_how_much_of_the_model_it_changes(judge_dir, adapter_dir, tmp_path, caplog):
    caplog.set_level("INFO", "paco_judge")
    load_adapter(base(judge_dir), adapter_dir)
    tensors = len(load_file(adapter_dir / ADAPTER))
    layers = tensors // 2
    said = f"{layers} of {layers} layers, {tensors} tensors, rank 4, scale 2"
    assert said in caplog.text and "changes nothing" not in caplog.text

    def zero(weights: dict) -> dict:
        return {name: value * (".lora_B" not in name) for name, value in weights.items()}

    load_adapter(base(judge_dir), changed(adapter_dir, tmp_path / "zero", zero))
    assert "changes nothing" in caplog.text
    empty = changed(adapter_dir, tmp_path / "empty", lambda weights: {})
    with pytest.raises(UserError, match="empty"):
        load_adapter(base(judge_dir), empty)


def test_an_adapter_on_another_base_or_on_itself_is_a_warning(
    judge_dir, adapter_dir, tmp_path, caplog
):
    """A merged judge with its own adapter: each change counts twice."""

    def warning_with(model: Path, trained_on: str) -> bool:
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter_dir, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = trained_on
        (folder / "adapter_config.json").write_text(json.dumps(config))
        caplog.clear()
        load_adapter(base(model), folder)
        return "was trained on" in caplog.text

    merged = shutil.copytree(judge_dir, tmp_path / "merged")
    assert warning_with(merged, str(judge_dir))
    assert warning_with(judge_dir, "Qwen/Qwen3-VL-8B-Instruct")
    for trained_on in (f"{judge_dir}/", f"Org/{judge_dir.name.upper()}", ""):  # "": unknown
        assert not warning_with(judge_dir, trained_on)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_models_tensor_that_is_missing_or_does_not_fit_is_named(judge_dir, tmp_path, change):
    def damaged(weights: dict) -> dict:
        name = first(weights, "k_proj.weight")
        weights[name] = torch.ones(3, 128)
        if change == "missing":
            del weights[name]
        return weights

    folder = changed(judge_dir, tmp_path / "changed", damaged)
    with pytest.raises(UserError, match=re.escape(K_PROJ)):
        from_pretrained_strict(AutoModelForImageTextToText, folder)


@pytest.mark.parametrize("change", ["missing", "shape", "elsewhere"])
def test_an_adapters_tensor_that_is_missing_or_does_not_fit_is_named(
    judge_dir, adapter_dir, tmp_path, change
):
    def damaged(weights: dict) -> dict:
        name = first(weights, "q_proj.lora_B")
        if change == "elsewhere":
            return weights | {name.replace("q_proj", "x_proj"): weights[name].clone()}
        weights[name] = torch.ones(9, 2)
        if change == "missing":
            del weights[name]
        return weights

    folder = changed(adapter_dir, tmp_path / "changed", damaged)
    with pytest.raises(UserError, match="x_proj" if change == "elsewhere" else "q_proj"):
        load_adapter(base(judge_dir), folder)
