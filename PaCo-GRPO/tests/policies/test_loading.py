"""A model that cannot be loaded is an error that names the file or option."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from named import load as load_named
from safetensors.torch import load_file, save_file
from tiny_pipelines import build_tiny_flux
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from paco_grpo.options import ConfigError
from paco_grpo.options.schema import PretrainedOptions
from paco_grpo.policies import PolicyLoadError, load_policy, policy_class
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.models import load_models
from paco_grpo.training.checks import check_run
from paco_judge.errors import UserError


def test_broken_index(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(PolicyLoadError, match=r"model_index\.json"):
        load_policy(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipelin"}')
    option = ("pretrained.model", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_run(load_named("toy_t2is", option))
    assert str(caught.value).startswith(
        f"config.pretrained.model={tmp_path}: model_index.json names FluxPipelin, but diffusers"
    )


def test_no_code_of_a_model_runs(model, monkeypatch):
    """Neither beside the weights nor from a package that the index names."""
    (model / "my_encoders.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(model)
    index = json.loads((model / "model_index.json").read_bytes())
    index["text_encoder_2"] = ["my_encoders", "LargeEncoder"]
    (model / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PolicyLoadError, match="text_encoder_2 is a LargeEncoder of my_encoders"):
        policy_class(PretrainedOptions(model=str(model)))
    with pytest.raises(PolicyLoadError, match="text_encoder_2 is a LargeEncoder of my_encoders"):
        load_policy(model)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch\nraise RuntimeError('needs a B200')", "RuntimeError: needs a B200 .*line 2"),
        ("class Mine:\n    pass", "no subclass of DiffusersPolicy"),
        ("from paco_grpo.policies.z_image import ZImagePolicy as Mine", "ZImageP.*FluxPipeline"),
        ("from paco_grpo.policies.flux import FluxPolicy\nclass Mine(FluxPolicy): pass", None),
        ("from paco_grpo.policies.flux_kontext import FluxKontextPolicy as Mine", None),
    ],
)
def test_a_policy_of_ones_own(tiny_flux_dir, tmp_path, monkeypatch, code, words):
    name = f"my_policy_{len(code)}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    option = ("pretrained.policy", f"{name}:Mine")
    options = load_named("toy_t2is", ("pretrained.model", str(tiny_flux_dir)), option)
    if words is None:
        assert issubclass(policy_class(options.pretrained), DiffusersPolicy)
        return
    with pytest.raises(ConfigError, match=rf"^config\.pretrained\.policy='{name}:Mine'.*{words}"):
        check_run(options)


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


def test_models_of_any_name_are_whole_and_no_pickles(tmp_path):
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=8,
    )
    pipeline = build_tiny_flux()
    pipeline.register_modules(image_encoder=CLIPVisionModelWithProjection(config))
    pipeline.save_pretrained(tmp_path)
    models = load_models(tmp_path, torch.bfloat16)
    names = {"text_encoder", "text_encoder_2", "transformer", "image_encoder"}
    assert models.keys() == names | {"vae"}
    assert {models[name].dtype for name in names} == {torch.bfloat16}
    assert models["vae"].dtype == torch.float32
    file = tmp_path / "image_encoder" / "model.safetensors"
    tensor = change(file)
    with pytest.raises(UserError, match=tensor.rpartition(".")[0]):
        load_models(tmp_path, torch.float32)
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_models(tmp_path, torch.float32)


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
