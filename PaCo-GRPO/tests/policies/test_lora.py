"""LoRA: attached without changing anything, switched inside a block, saved and loaded in both formats."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_pipelines import build_tiny_flux
from tiny_policies import NAMES, disturb, items, load, trainable_parameters, trained

from paco_grpo.options import ConfigError
from paco_grpo.policies import PolicyLoadError
from paco_grpo.policies.lora import (
    add_lora,
    add_snapshot,
    blend_snapshot,
    find_lora,
    lora_parameters,
    merged,
    reference,
    save_diffusers,
    save_peft,
    snapshot,
)
from paco_grpo.sampling.denoise import Sampling, rollout

BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_FORMAT = pytest.mark.parametrize("save", [save_peft, save_diffusers])


def latents_of(policy, name="flux"):
    conditioning = policy.encode(items(name, "a green cross"))
    return rollout(policy, conditioning, [0], [4], 32, 32, Sampling(3)).clean_latents


@BY_NAME
def test_a_new_lora_sits_on_every_target_and_changes_nothing(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    before = latents_of(policy, name)
    add_lora(policy, rank=3, alpha=6)
    assert torch.equal(latents_of(policy, name), before)
    weights = dict(policy.transformer.named_parameters())
    names = [n for n, p in weights.items() if p.requires_grad]
    assert names and all(".lora_" in n for n in names)
    layers = {n.split(".lora_")[0] for n in names}
    assert {layer.split("blocks.", 1)[1].split(".", 1)[1] for layer in layers} == set(
        policy.lora_targets
    )
    gaussian = torch.cat([p.detach().flatten() for n, p in weights.items() if ".lora_A." in n])
    assert np.std(gaussian.numpy()) == pytest.approx(1 / 3, rel=0.1)


@BY_NAME
def test_reference_and_snapshot(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    base = latents_of(policy, name)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    trainable = trainable_parameters(policy)
    add_snapshot(policy, "old")
    first, start = latents_of(policy, name), [p.detach().clone() for p in trainable]
    disturb(policy, seed=1)
    second = latents_of(policy, name)
    flags = [p.requires_grad for p in policy.transformer.parameters()]
    with pytest.raises(KeyError), reference(policy):
        assert torch.equal(latents_of(policy, name), base)
        raise KeyError
    with snapshot(policy, "old"):
        assert torch.equal(latents_of(policy, name), first)
        with merged(policy):  # the active adapter is merged
            torch.testing.assert_close(latents_of(policy, name), first, rtol=0, atol=1e-4)
    assert torch.equal(latents_of(policy, name), second)
    assert all((a - b).abs().max() > 1e-3 for a, b in ((first, base), (second, first)))
    assert [p.requires_grad for p in policy.transformer.parameters()] == flags
    assert len(lora_parameters(policy)) == 2 * len(trainable)
    blend_snapshot(policy, "old", decay=0.25)
    old = [p for n, p in policy.transformer.named_parameters() if ".old." in n]
    for mixed, before, now in zip(old, start, trainable, strict=True):
        torch.testing.assert_close(mixed, 0.25 * before + 0.75 * now.detach())


@BY_FORMAT
@BY_NAME
def test_round_trip(tiny_folder, name, tmp_path, save):
    folder = tiny_folder(name)
    policy = trained(name, folder, rank=4, alpha=10)
    save(policy, tmp_path)
    again = load(name, folder)
    add_lora(again, rank=64, alpha=1, lora_path=tmp_path)  # rank and alpha come from the file
    torch.testing.assert_close(latents_of(again, name), latents_of(policy, name), rtol=0, atol=1e-5)
    assert [p.shape for p in trainable_parameters(again)] == [
        p.shape for p in trainable_parameters(policy)
    ]
    add_snapshot(again, "old")
    disturb(again, seed=1)
    save(again, tmp_path / "again")  # the trained adapter, not the snapshot
    third = load(name, folder)
    add_lora(third, lora_path=tmp_path / "again")
    torch.testing.assert_close(latents_of(third, name), latents_of(again, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        ("attention", {f"attn.{n}" for n in (
            "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}),
        (["to_q", "img_mlp.net.2"], {"attn.to_q", "img_mlp.net.2"}),
        (r"transformer_blocks\.1\..*(attn|norm).*v.*", {"attn.to_v", "attn.add_v_proj"}),
    ],
)  # fmt: skip
def test_targets(tiny_folder, targets, kinds):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    add_lora(policy, 2, 4, targets)
    layers = [
        n.split(".lora_A")[0] for n, _ in policy.transformer.named_parameters() if ".lora_A" in n
    ]
    assert {layer.split(".", 2)[2] for layer in layers} == kinds
    assert {layer.split(".")[1] for layer in layers} == ({"1"} if "1" in targets else {"0", "1"})


def test_a_target_without_a_layer_is_an_error(tiny_folder):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    # FLUX's name, which the published training gave Qwen-Image-Edit
    for targets, near in (
        (["attn.to_q", "ff.net.2"], "img_mlp.net.2"),
        ("attenton", "'attention'"),
        ("attn.(", ""),
    ):
        with pytest.raises(ConfigError, match=rf"config\.train\.lora_targets.*{near}"):
            add_lora(policy, targets=targets)


@BY_FORMAT
def test_bad_loras_are_refused(tiny_flux_dir, tmp_path, save):
    not_finite = trained("flux", tiny_flux_dir)
    with torch.no_grad():
        trainable_parameters(not_finite)[1][0, 0] = float("nan")
    save(not_finite, tmp_path / "not finite")
    build_tiny_flux(width=48).save_pretrained(tmp_path / "other")
    save(trained("flux", tmp_path / "other"), tmp_path / "of another model")
    save(trained("flux", tiny_flux_dir), tmp_path / "pickle")
    file = next((tmp_path / "pickle").glob("*.safetensors"))
    file.rename(file.with_suffix(".bin"))
    policy = load("flux", tiny_flux_dir)
    for name in ("nowhere", "not finite", "of another model", "pickle"):
        with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path"):
            add_lora(
                load("flux", tiny_flux_dir) if name == "not finite" else policy,
                lora_path=tmp_path / name,
            )


def test_adapters_of_the_hub_and_plain_peft(tiny_flux_dir, tmp_path, monkeypatch):
    """From the hub's cache, while the hub cannot be reached; its targets are suffixes, as in published ones."""
    from huggingface_hub import constants

    policy = trained("flux", tiny_flux_dir, rank=4, alpha=10)
    save_peft(policy, tmp_path / "lora")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--adapter"
    shutil.copytree(tmp_path / "lora", repository / "snapshots" / ("0" * 40))
    config = repository / "snapshots" / ("0" * 40) / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"target_modules": list(policy.lora_targets)})
    )
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    again, other = load("flux", tiny_flux_dir), load("flux", tiny_flux_dir)
    add_lora(again, lora_path="someone/adapter")
    other.transformer = PeftModel.from_pretrained(other.transformer, str(tmp_path / "lora"))
    assert torch.equal(latents_of(again), latents_of(policy))
    torch.testing.assert_close(latents_of(other), latents_of(policy), rtol=0, atol=1e-6)
    with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path.*someone/other"):
        find_lora("someone/other")
