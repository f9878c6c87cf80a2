"""Every way in which a model cannot be loaded has an error message that names the file or option."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from paco_grpo.policies import PolicyLoadError, load_policy


def test_missing_folder(tmp_path):
    for place in (tmp_path / "nowhere", "../no/such/model", "./model"):
        with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model"):
            load_policy(place)


def test_folder_without_index(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
        load_policy(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_broken_index(tmp_path, text):
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
        load_policy(tmp_path)


def test_unknown_pipeline(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipelin"}))
    with pytest.raises(PolicyLoadError, match=r"FluxPipelin, .*'FluxPipeline'.*FluxKontextPipeline"):
        load_policy(tmp_path)


@pytest.mark.parametrize("size", [0, 1000])
def test_damaged_weights(tmp_path, tiny_flux_dir, size):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    file = next((tmp_path / "model" / "transformer").glob("*.safetensors"))
    weights = file.read_bytes()[:size]
    file.unlink()
    if weights:
        file.write_bytes(weights)
    with pytest.raises(PolicyLoadError, match=str(tmp_path / "model")):
        load_policy(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "encoder"), [("flux", "text_encoder"), ("flux", "text_encoder_2"), ("qwen_image_edit", "text_encoder")]
)
def test_a_text_encoder_without_one_of_its_tensors(tmp_path, tiny_folder, name, encoder):
    shutil.copytree(tiny_folder(name), tmp_path / "model")
    file = tmp_path / "model" / encoder / "model.safetensors"
    weights = load_file(file)
    removed = next(key for key in weights if "layer" in key or "block" in key)
    del weights[removed]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(PolicyLoadError, match=removed.split(".", 2)[2]):
        load_policy(tmp_path / "model")


def test_a_text_encoder_as_a_pickle_is_refused(tmp_path, tiny_flux_dir):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    file = tmp_path / "model" / "text_encoder_2" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(PolicyLoadError, match="text_encoder_2.*safetensors"):
        load_policy(tmp_path / "model")


def damage(file: Path, kind: str) -> str:
    """Rewrite weights with one tensor missing, one too many, or one of another shape; returns its name."""
    weights = load_file(file)
    name = sorted(weights)[len(weights) // 2]
    if kind == "missing":
        del weights[name]
    elif kind == "unexpected":
        name = "left.over"
        weights[name] = torch.zeros(2)
    else:
        weights[name] = torch.zeros([size + 1 for size in weights[name].shape])
    save_file(weights, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched"])
@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
def test_weights_must_be_those_of_the_model(tmp_path, tiny_folder, name, part, kind):
    shutil.copytree(tiny_folder(name), tmp_path / "model")
    tensor = damage(tmp_path / "model" / part / "diffusion_pytorch_model.safetensors", kind)
    with pytest.raises(PolicyLoadError) as caught:
        load_policy(tmp_path / "model")
    message = str(caught.value)
    assert str(tmp_path / "model") in message and tensor in message and "\n" not in message


def test_a_vae_that_is_not_finite(tmp_path, tiny_flux_dir):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    file = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(PolicyLoadError, match=f"not finite in {name}"):
        load_policy(tmp_path / "model")


def test_every_file_of_a_sharded_transformer_must_be_whole(tmp_path, tiny_flux_dir):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    folder = tmp_path / "model" / "transformer"
    model = FluxTransformer2DModel.from_pretrained(folder)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert load_policy(tmp_path / "model")
    tensor = damage(files[1], "missing")
    with pytest.raises(PolicyLoadError, match=tensor):
        load_policy(tmp_path / "model")


@pytest.mark.parametrize("offline", [False, True])
def test_hub_that_cannot_be_reached(monkeypatch, tmp_path, offline):
    # A port without a listener, and an empty cache.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model.*someone/something"):
        load_policy("someone/something")
