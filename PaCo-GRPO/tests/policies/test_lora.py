"""LoRA: attached without changing anything, switched inside a block, saved and loaded in both formats."""

import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_pipelines import build_tiny_flux
from tiny_policies import NAMES, disturb, items, load

from paco_grpo.options import ConfigError
from paco_grpo.policies import PolicyLoadError
from paco_grpo.policies.base import unwrap
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
    trainable_parameters,
)
from paco_grpo.sampling.denoise import Sampling, rollout

BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_FORMAT = pytest.mark.parametrize("save", [save_peft, save_diffusers])


def latents_of(policy, name="flux"):
    conditioning = policy.encode(items(name, "a green cross"))
    return rollout(policy, conditioning, [0], [4], 32, 32, Sampling(3)).clean_latents


def with_lora(folder, name="flux", rank=2, alpha=4, **options):
    policy = load(name, folder, **options)
    add_lora(policy, rank, alpha)
    disturb(policy)
    return policy


@BY_NAME
def test_a_new_lora_sits_on_every_target_and_changes_nothing(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    before = latents_of(policy, name)
    add_lora(policy, rank=3, alpha=6)
    assert torch.equal(latents_of(policy, name), before)
    weights = dict(unwrap(policy.transformer).named_parameters())
    names = [n for n, p in weights.items() if p.requires_grad]
    assert names and all(".lora_" in n for n in names)
    layers = {n.split(".lora_")[0] for n in names}
    assert {layer.split("blocks.", 1)[1].split(".", 1)[1] for layer in layers} == set(policy.lora_targets)
    blocks = len(policy.transformer.transformer_blocks)
    assert len([layer for layer in layers if layer.startswith("transformer_blocks.")]) == 12 * blocks
    single = {layer.split(".", 2)[2] for layer in layers if layer.startswith("single_")}
    assert single == ({"attn.to_q", "attn.to_k", "attn.to_v"} if name != "qwen_image_edit" else set())
    gaussian = torch.cat([p.detach().flatten() for n, p in weights.items() if ".lora_A." in n])
    assert np.std(gaussian.numpy()) == pytest.approx(1 / 3, rel=0.1)


@BY_NAME
def test_reference_is_the_base_model_and_gradients_survive(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    before = latents_of(policy, name)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    changed = latents_of(policy, name)
    assert (changed - before).abs().max() > 1e-3
    flags = [p.requires_grad for p in policy.transformer.parameters()]
    with reference(policy):
        assert torch.equal(latents_of(policy, name), before)
    assert [p.requires_grad for p in policy.transformer.parameters()] == flags
    with pytest.raises(KeyError), reference(policy):
        raise KeyError
    assert torch.equal(latents_of(policy, name), changed)


@pytest.mark.parametrize("switch", [reference, merged, lambda policy: snapshot(policy, "old")])
def test_without_an_adapter_there_is_nothing_to_switch(tiny_flux_dir, switch):
    policy = load("flux", tiny_flux_dir)
    assert lora_parameters(policy) == trainable_parameters(policy) == []
    with pytest.raises(ValueError, match=r"config\.use_lora"), switch(policy):
        pass


@BY_NAME
def test_a_snapshot_is_frozen_switched_and_blended(tiny_folder, name):
    policy = with_lora(tiny_folder(name), name)
    trainable = trainable_parameters(policy)
    add_snapshot(policy, "old")
    first, start = latents_of(policy, name), [p.detach().clone() for p in trainable]
    disturb(policy, seed=1)
    second = latents_of(policy, name)
    with snapshot(policy, "old"):
        assert torch.equal(latents_of(policy, name), first)
        with merged(policy):  # the active adapter is merged
            torch.testing.assert_close(latents_of(policy, name), first, rtol=0, atol=1e-4)
    assert torch.equal(latents_of(policy, name), second)
    assert (second - first).abs().max() > 1e-3
    assert [id(p) for p in trainable_parameters(policy)] == [id(p) for p in trainable]
    assert len(lora_parameters(policy)) == 2 * len(trainable)
    blend_snapshot(policy, "old", decay=0.25)
    old = [p for n, p in unwrap(policy.transformer).named_parameters() if ".old." in n]
    for mixed, before, now in zip(old, start, trainable, strict=True):
        torch.testing.assert_close(mixed, 0.25 * before + 0.75 * now.detach())


def test_lora_weights_are_float32_on_a_low_precision_base(tiny_flux_dir):
    policy = with_lora(tiny_flux_dir, dtype=torch.bfloat16)
    add_snapshot(policy, "old")
    assert {p.dtype for p in lora_parameters(policy)} == {torch.float32}
    assert next(policy.transformer.x_embedder.parameters()).dtype == torch.bfloat16
    conditioning = policy.encode(items("flux", "a"))
    policy.velocity(policy.initial_latents([1], 16, 16), torch.tensor([0.5]), conditioning, 16, 16).mean().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable_parameters(policy))


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        ("attention", {f"attn.{n}" for n in (
            "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}),
        (["to_q", "img_mlp.net.2"], {"attn.to_q", "img_mlp.net.2"}),
        ("attn.to_k", {"attn.to_k"}),
        (r"transformer_blocks\.1\..*(attn|norm).*v.*", {"attn.to_v", "attn.add_v_proj"}),
    ],
)  # fmt: skip
def test_targets(tiny_folder, targets, kinds):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    add_lora(policy, 2, 4, targets)
    layers = [n.split(".lora_A")[0] for n, _ in unwrap(policy.transformer).named_parameters() if ".lora_A" in n]
    assert {layer.split(".", 2)[2] for layer in layers} == kinds
    assert {layer.split(".")[1] for layer in layers} == ({"1"} if "1" in targets else {"0", "1"})


@pytest.mark.parametrize(
    ("targets", "near"),
    [
        (["attn.to_q", "ff.net.2"], "img_mlp.net.2"),  # FLUX's name, which the published training gave Qwen-Image-Edit
        ("attenton", "'attention'"),
        (r".*\.attn\.to_qq", "'attn.to_q'"),
        ("attn.(", "regular expression"),
    ],
)
def test_a_target_without_a_layer_names_near_ones(tiny_folder, targets, near):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    with pytest.raises(ConfigError, match=rf"config\.train\.lora_targets.*{near}"):
        add_lora(policy, targets=targets)
    assert not lora_parameters(policy)


# --- files ------------------------------------------------------------------------------------------------------------


@BY_FORMAT
@BY_NAME
def test_round_trip(tiny_folder, name, tmp_path, save):
    folder = tiny_folder(name)
    policy = with_lora(folder, name, rank=4, alpha=10)
    save(policy, tmp_path)
    again = load(name, folder)
    add_lora(again, rank=64, alpha=1, lora_path=tmp_path)  # rank and alpha come from the file
    torch.testing.assert_close(latents_of(again, name), latents_of(policy, name), rtol=0, atol=1e-5)
    assert [p.shape for p in trainable_parameters(again)] == [p.shape for p in trainable_parameters(policy)]
    add_snapshot(again, "old")
    disturb(again, seed=1)
    save(again, tmp_path / "again")  # the trained adapter, not the snapshot
    third = load(name, folder)
    add_lora(third, lora_path=tmp_path / "again")
    torch.testing.assert_close(latents_of(third, name), latents_of(again, name), rtol=0, atol=1e-5)


def test_plain_peft_reads_it(tiny_flux_dir, tmp_path):
    policy = with_lora(tiny_flux_dir, rank=4, alpha=10)
    save_peft(policy, tmp_path)
    other = load("flux", tiny_flux_dir)
    other.transformer = PeftModel.from_pretrained(other.transformer, str(tmp_path))
    torch.testing.assert_close(latents_of(other), latents_of(policy), rtol=0, atol=1e-6)


@pytest.mark.parametrize("save", [save_peft, save_diffusers])
def test_a_lora_that_is_not_finite_is_refused(tiny_flux_dir, tmp_path, save):
    policy = with_lora(tiny_flux_dir)
    with torch.no_grad():
        trainable_parameters(policy)[1][0, 0] = float("nan")
    save(policy, tmp_path)
    with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path.*not finite"):
        add_lora(load("flux", tiny_flux_dir), lora_path=tmp_path)


def test_bad_lora_paths(tiny_flux_dir, tmp_path):
    policy = load("flux", tiny_flux_dir)
    for place, named in ((tmp_path / "nowhere", "no folder"), (tmp_path, "pytorch_lora_weights.*adapter_config.json")):
        with pytest.raises(PolicyLoadError, match=rf"config\.train\.lora_path.*{named}"):
            add_lora(policy, lora_path=place)
    other = with_lora(build_tiny_flux(tmp_path / "other", width=48))
    for save in (save_peft, save_diffusers):
        folder = tmp_path / save.__name__
        save(other, folder)
        with pytest.raises(PolicyLoadError, match=r"config\.pretrained\.model"):
            add_lora(load("flux", tiny_flux_dir), lora_path=folder)
    (tmp_path / "save_peft" / "adapter_config.json").write_text("{")
    with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path.*cannot be read"):
        add_lora(load("flux", tiny_flux_dir), lora_path=tmp_path / "save_peft")


def test_a_pickle_is_not_read(tiny_flux_dir, tmp_path):
    save_peft(with_lora(tiny_flux_dir), tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path"):
        add_lora(load("flux", tiny_flux_dir), lora_path=tmp_path)


@BY_FORMAT
def test_adapters_of_the_hub(save, tiny_flux_dir, tmp_path, monkeypatch):
    """From its cache, while the hub cannot be reached."""
    from huggingface_hub import constants

    policy = with_lora(tiny_flux_dir)
    save(policy, tmp_path / "lora")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--adapter"
    shutil.copytree(tmp_path / "lora", repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    again = load("flux", tiny_flux_dir)
    add_lora(again, lora_path="someone/adapter")
    for ours, theirs in zip(trainable_parameters(policy), trainable_parameters(again), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(PolicyLoadError, match=r"config\.train\.lora_path.*someone/other"):
        find_lora("someone/other")
