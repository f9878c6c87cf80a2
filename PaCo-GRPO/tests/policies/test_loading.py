"""A model that cannot be loaded is an error that names the file or option."""

import shutil
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from paco_grpo.policies import PolicyLoadError, load_policy


def test_broken_index(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model"):
        load_policy(tmp_path / "nowhere")
    for text in (None, "{", "[1]", "[]", '{"_class_name": "FluxPipelin"}'):
        if text is not None:
            (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
            load_policy(tmp_path)


@pytest.fixture
def model(tmp_path, tiny_folder, request):
    """A copy of a tiny pipeline, to be damaged."""
    return shutil.copytree(tiny_folder(getattr(request, "param", "flux")), tmp_path / "model")


def change(file, how) -> str:
    """Rewrite weights after ``how(weights, the middle one's name)``; returns that name."""
    weights = load_file(file)
    name = sorted(weights)[len(weights) // 2]
    how(weights, name)
    save_file(weights, file, {"format": "pt"})
    return name


DAMAGE = {
    "missing": lambda weights, name: weights.pop(name),
    "unexpected": lambda weights, name: weights.update({f"{name}.left.over": torch.zeros(2)}),
    "mismatched": lambda weights, name: weights.update(
        {name: torch.zeros([size + 1 for size in weights[name].shape])}
    ),
}


@pytest.mark.parametrize(
    ("model", "file", "kind"),
    [
        ("flux", "transformer/diffusion_pytorch_model", "missing"),
        ("flux", "vae/diffusion_pytorch_model", "mismatched"),
        ("qwen_image_edit", "text_encoder/model", "missing"),
    ],
    indirect=["model"],
)
def test_weights_must_be_those_of_the_model(model, file, kind):
    tensor = change(model / f"{file}.safetensors", DAMAGE[kind])
    with pytest.raises(PolicyLoadError) as caught:
        load_policy(model)
    assert str(model) in str(caught.value) and tensor.split(".", 2)[-1] in str(caught.value)


def test_tensors_that_the_model_does_not_have_are_a_warning(model, caplog):
    """Published files were saved by other versions of diffusers."""
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensor = change(file, DAMAGE["unexpected"])
    assert load_policy(model)
    assert f"{tensor}.left.over" in caplog.text


def test_a_text_encoder_as_a_pickle_is_refused(model):
    file = model / "text_encoder_2" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(PolicyLoadError, match="text_encoder_2.*safetensors"):
        load_policy(model)


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
        )
        started = time.monotonic()
        with pytest.raises(PolicyLoadError) as caught:
            load_policy("someone/something")
        message = str(caught.value)
        assert message.startswith("config.pretrained.model: the weights someone/something")
        for remedy in ("hf download", "hf auth login", "local folder", "HF_ENDPOINT", "HF_HOME"):
            assert remedy in message
        assert len(message.splitlines()) == 1 and time.monotonic() - started < 5
