"""Every way in which a model cannot be loaded has one clear message with a remedy."""

import json
import shutil

import pytest

from paco_grpo.policies import PolicyLoadError, load_policy


def test_missing_folder(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"nowhere does not exist.*config\.pretrained\.model"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(PolicyLoadError, match="does not exist"):
        load_policy("../no/such/model")


def test_folder_without_index(tmp_path):
    with pytest.raises(PolicyLoadError, match="no model_index.json.*transformer/"):
        load_policy(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_broken_index(tmp_path, text):
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(PolicyLoadError, match="not a readable diffusers pipeline index"):
        load_policy(tmp_path)


def test_unknown_pipeline(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipelin"}))
    with pytest.raises(PolicyLoadError, match=r"FluxPipelin.*nearest: FluxPipeline.*Known pipelines: .*FluxPipeline"):
        load_policy(tmp_path)


def test_incomplete_folder(tmp_path, tiny_flux_dir):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    for file in (tmp_path / "model" / "transformer").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(PolicyLoadError, match="incomplete or damaged"):
        load_policy(tmp_path / "model")


def test_truncated_weights(tmp_path, tiny_flux_dir):
    shutil.copytree(tiny_flux_dir, tmp_path / "model")
    file = next((tmp_path / "model" / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(PolicyLoadError, match="incomplete or damaged"):
        load_policy(tmp_path / "model")


def test_hub_unreachable(monkeypatch, tmp_path):
    from huggingface_hub import constants

    # A port where nobody listens, and an empty cache.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PolicyLoadError, match="cannot reach the model hub for 'someone/something'.*give its folder"):
        load_policy("someone/something")


def test_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PolicyLoadError, match="cannot reach the model hub"):
        load_policy("someone/something")
