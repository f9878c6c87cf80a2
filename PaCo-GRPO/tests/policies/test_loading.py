"""A model that cannot be loaded is an error that names the file or option."""

import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from paco_grpo.policies import PolicyLoadError, load_policy


def test_broken_index(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
        load_policy(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipelin"}')
    with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
        load_policy(tmp_path)


@pytest.fixture
def model(tmp_path, tiny_folder, request):
    """A copy of a tiny pipeline, to be damaged."""
    return shutil.copytree(tiny_folder(getattr(request, "param", "flux")), tmp_path / "model")


def change(file, left_over=False) -> str:
    """Take a tensor out of a file of weights, or add one to its name; returns its name."""
    weights = load_file(file)
    name = sorted(weights)[len(weights) // 2]
    if left_over:
        weights[f"{name}.left.over"] = torch.zeros(2)
    else:
        del weights[name]
    save_file(weights, file, {"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("model", "file"),
    [("flux", "transformer/diffusion_pytorch_model"), ("qwen_image_edit", "text_encoder/model")],
    indirect=["model"],
)
def test_weights_must_be_those_of_the_model(model, file):
    tensor = change(model / f"{file}.safetensors")
    with pytest.raises(PolicyLoadError) as caught:
        load_policy(model)
    assert str(model) in str(caught.value) and tensor.split(".", 2)[-1] in str(caught.value)


def test_tensors_that_the_model_does_not_have_are_a_warning(model, caplog):
    """Published files were saved by other versions of diffusers."""
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensor = change(file, left_over=True)
    assert load_policy(model)
    assert f"{tensor}.left.over" in caplog.text


def test_a_text_encoder_as_a_pickle_is_refused(model):
    file = model / "text_encoder_2" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(PolicyLoadError, match=r"model\.safetensors"):
        load_policy(model)


def test_a_model_that_is_not_here_names_the_download(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PolicyLoadError, match="config.pretrained.model: .*hf download"):
        load_policy("someone/something")
