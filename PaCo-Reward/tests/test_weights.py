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

from paco_judge.errors import UserError
from paco_judge.scorer import load_adapter
from paco_judge.weights import from_pretrained_strict

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
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
    """A change of the first tensor whose name holds ``part``; None removes it.

    With ``new_part``, it gets a new name.
    """

    def change(weights: dict) -> dict:
        name = next(name for name in weights if part in name)
        changed = weights | {name.replace(part, new_part or part): value}
        return {name: value for name, value in changed.items() if value is not None}

    return change


def test_whole_weights_pass_under_old_and_new_names(judge_dir, adapter_dir, tmp_path):
    """As transformers saves them, as in the published Qwen2.5-VL, and by the new names alone."""
    published_names = renamed((r"^model\.visual\.", "visual."))
    published = changed(judge_dir, tmp_path / "published", MODEL, published_names)
    new_names = renamed((r"^model\.(?!visual)", "model.language_model."))
    new = changed(judge_dir, tmp_path / "new", MODEL, new_names)
    for folder in (judge_dir, published, new):
        from_pretrained_strict(AutoModelForImageTextToText, folder)
    old_names = renamed(
        ("model.language_model.", "model."), ("model.model.visual.", "model.visual.")
    )
    old_adapter = changed(adapter_dir, tmp_path / "tuned", ADAPTER, old_names)
    for base, adapter in ((judge_dir, old_adapter), (published, old_adapter), (new, adapter_dir)):
        load_adapter(AutoModelForImageTextToText.from_pretrained(base), adapter)


def test_an_adapter_says_how_much_of_the_model_it_changes(judge_dir, adapter_dir, caplog):
    caplog.set_level("INFO", "paco_judge")
    load_adapter(AutoModelForImageTextToText.from_pretrained(judge_dir), adapter_dir)
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    tensors = load_file(adapter_dir / ADAPTER)
    layers = len(tensors) // 2
    scale = config["lora_alpha"] / config["r"]
    # Where another test has trained, transformers logs more.
    (line,) = [record.message for record in caplog.records if record.name.startswith("paco_judge")]
    assert line == (
        f"adapter {adapter_dir}: {layers} of {layers} layers, {len(tensors)} tensors, "
        f"rank {config['r']}, scale {scale:g}"
    )


def test_an_adapter_that_changes_nothing_is_named(judge_dir, adapter_dir, tmp_path, caplog):
    zero_b = lambda weights: {
        name: tensor * 0 if ".lora_B" in name else tensor for name, tensor in weights.items()
    }
    base = AutoModelForImageTextToText.from_pretrained(judge_dir)
    load_adapter(base, changed(adapter_dir, tmp_path / "zero", ADAPTER, zero_b))
    assert "changes nothing" in caplog.text
    empty = changed(adapter_dir, tmp_path / "empty", ADAPTER, lambda weights: {})
    with pytest.raises(UserError, match="has no tensors"):
        load_adapter(AutoModelForImageTextToText.from_pretrained(judge_dir), empty)


def test_an_adapter_of_another_format_is_named(judge_dir, tmp_path):
    tensors = {"transformer.blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 8)}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(UserError, match="PEFT's format"):
        load_adapter(AutoModelForImageTextToText.from_pretrained(judge_dir), tmp_path)


def test_an_adapter_on_another_base_or_on_itself_is_a_warning(
    judge_dir, adapter_dir, tmp_path, caplog
):
    """A merged judge with its own adapter: each change counts twice."""

    def warning_with(base: Path, trained_on: str) -> bool:
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter_dir, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = trained_on
        (folder / "adapter_config.json").write_text(json.dumps(config))
        caplog.clear()
        load_adapter(AutoModelForImageTextToText.from_pretrained(base), folder)
        return "was trained on" in caplog.text

    merged = shutil.copytree(judge_dir, tmp_path / "merged")
    assert warning_with(merged, str(judge_dir))
    assert warning_with(judge_dir, "Qwen/Qwen3-VL-8B-Instruct")
    for trained_on in (f"{judge_dir}/", f"Org/{judge_dir.name.upper()}", ""):  # "": unknown
        assert not warning_with(judge_dir, trained_on)


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
        (
            ADAPTER,
            put("q_proj.lora_A", torch.ones(2, 9), "x.lora_A"),
            "1 tensors for layers that its base lacks: base_model",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    judge_dir, adapter_dir, tmp_path, file, change, problem
):
    folder = changed(
        judge_dir if file == MODEL else adapter_dir, tmp_path / "changed", file, change
    )
    with pytest.raises(UserError, match=re.escape(problem)):
        if file == MODEL:
            from_pretrained_strict(AutoModelForImageTextToText, folder)
        else:
            load_adapter(AutoModelForImageTextToText.from_pretrained(judge_dir), folder)


def test_a_shard_that_a_download_left_out_is_named(judge_dir, tmp_path):
    folder = shutil.copytree(judge_dir, tmp_path / "judge", ignore=shutil.ignore_patterns(MODEL))
    index = {"metadata": {}, "weight_map": {K_PROJ: "model-00002-of-00002.safetensors"}}
    (folder / f"{MODEL}.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors"):
        from_pretrained_strict(AutoModelForImageTextToText, folder)
