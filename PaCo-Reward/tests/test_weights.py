"""Weights are whole when they are loaded: models, and LoRA adapters on them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llamafactory.model import adapter as llamafactory_adapter
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from paco_judge.errors import UserError
from paco_judge.scorer import load_adapter
from paco_judge.weights import from_pretrained_strict, lower_limits
from paco_reward import overlay

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
K_PROJ = "layers.0.self_attn.k_proj.weight"
Q_LORA = "layers.0.self_attn.q_proj.lora_B.weight"


def changed(folder: Path, copy: Path, change: Callable[[str, torch.Tensor], dict]) -> Path:
    """A copy of a folder with what ``change`` makes of each tensor."""
    shutil.copytree(folder, copy)
    file = copy / (ADAPTER if (copy / ADAPTER).exists() else MODEL)
    weights = {}
    for name, tensor in load_file(file).items():
        weights |= change(name, tensor)
    save_file(weights, file, {"format": "pt"})
    return copy


def base(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder)


def test_adapters_load_under_old_and_new_names(judge_dir, adapter_dir, tmp_path):
    """The base as transformers saves it, and with the names of the published Qwen2.5-VL.

    Also where a training continues one.
    """

    def old(name: str, tensor: torch.Tensor) -> dict:
        return {re.sub(r"model\.(language_model\.|model\.(?=visual))", "model.", name): tensor}

    published = changed(
        judge_dir,
        tmp_path / "old",
        lambda name, tensor: {name.removeprefix("model.") if "visual" in name else name: tensor},
    )
    old_adapter = changed(adapter_dir, tmp_path / "tuned", old)
    for folder in (judge_dir, published):
        load_adapter(base(folder), old_adapter)
        load_adapter(base(folder), adapter_dir)
    overlay.install()
    continued = llamafactory_adapter.PeftModel.from_pretrained(
        base(judge_dir), str(old_adapter), is_trainable=True
    )
    tensors = get_peft_model_state_dict(continued)
    for name, expected in load_file(adapter_dir / ADAPTER).items():
        assert torch.equal(tensors[name], expected)
    assert all(p.requires_grad for name, p in continued.named_parameters() if "lora_" in name)


def test_other_architectures_keep_their_names(tiny, tmp_path):
    folder = tiny.save_other_judge(tmp_path / "llava")
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "linear_1"])
    trained = get_peft_model(base(folder), config)
    trained.save_pretrained(tmp_path / "adapter")
    expected = get_peft_model_state_dict(trained)
    assert any("multi_modal_projector" in name for name in expected)
    loaded = get_peft_model_state_dict(load_adapter(base(folder), tmp_path / "adapter"))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_what_is_odd_about_an_adapter_is_a_warning(judge_dir, adapter_dir, tmp_path, caplog):
    """On a merged judge with its own adapter, each change counts twice."""
    zero = changed(
        adapter_dir, tmp_path / "zero", lambda name, value: {name: value * (".lora_B" not in name)}
    )
    merged = shutil.copytree(judge_dir, tmp_path / "merged")
    for folder, adapter in ((judge_dir, adapter_dir), (judge_dir, zero), (merged, adapter_dir)):
        caplog.clear()
        load_adapter(base(folder), adapter)
        assert ("changes nothing" in caplog.text) == (adapter is zero)
        assert ("was trained on" in caplog.text) == (folder is merged)


@pytest.mark.parametrize(("limit", "longest"), [(1568, 1568), (10**9, 3136), (0, 3136)])
def test_a_limit_shrinks_large_images_and_raises_no_limit(tiny, limit, longest):
    """An exported judge has the limit of its own training."""
    processor = tiny.make_processor()
    lower_limits(processor, limit)
    assert processor.image_processor.size["longest_edge"] == longest


CHANGES = {
    "missing": lambda name, tensor: {},
    "shape": lambda name, tensor: {name: torch.ones(3, 5)},
    "elsewhere": lambda name, tensor: {
        name: tensor,
        name.replace("q_proj", "x_proj"): tensor.clone(),
    },
}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", "missing"),
        ("adapter", "missing"),
        ("adapter", "shape"),
        ("adapter", "elsewhere"),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    judge_dir, adapter_dir, tmp_path, part, change
):
    """Of a model, of an adapter."""
    source, ending = {"model": (judge_dir, K_PROJ), "adapter": (adapter_dir, Q_LORA)}[part]

    def damaged(name: str, tensor: torch.Tensor) -> dict:
        return CHANGES[change](name, tensor) if name.endswith(ending) else {name: tensor}

    folder = changed(source, tmp_path / "changed", damaged)
    with pytest.raises(UserError, match="x_proj" if change == "elsewhere" else "[kq]_proj"):
        if part == "model":
            from_pretrained_strict(AutoModelForImageTextToText, folder)
        else:
            load_adapter(base(judge_dir), folder)
