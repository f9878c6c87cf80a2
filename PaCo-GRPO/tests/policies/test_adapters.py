"""LoRA: adds nothing at first, can be switched, and goes out and comes back in both formats."""

import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_flux import build_tiny_flux

from paco_grpo.policies import PolicyLoadError, load_policy
from paco_grpo.policies.adapters import (
    add_lora,
    add_old_adapter,
    blend_old_adapter,
    find_lora,
    old_adapter_decay,
    save_diffusers,
    save_peft,
    trainable_parameters,
    unwrap,
)
from paco_grpo.sampling.denoise import rollout
from paco_grpo.types import Item

LENGTH = 16
PROMPT = "a green cross"


def make(folder, **kwargs):
    return load_policy(folder, max_sequence_length=LENGTH, **kwargs)


def sample(policy) -> torch.Tensor:
    conditioning = policy.encode([Item(0, PROMPT)])
    return rollout(policy, conditioning, [0], [4], 16, 16, num_steps=3, noise_steps=(), noise_level=0.7).clean_latents


def disturb(policy, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(policy):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def test_a_new_lora_changes_nothing_and_only_it_is_trainable(tiny_flux_dir):
    policy = make(tiny_flux_dir)
    before = sample(policy)
    add_lora(policy, rank=3, alpha=6)
    assert torch.equal(sample(policy), before)
    names = {n for n, p in unwrap(policy.transformer).named_parameters() if p.requires_grad}
    assert names and all(".lora_" in name for name in names)
    touched = {name.split(".lora_")[0].split("blocks.", 1)[1].split(".", 1)[1] for name in names}
    assert touched == {*policy.lora_targets}  # every target of method §6, and no other
    single = {name for name in names if name.startswith("single_")}
    assert {name.split(".lora_")[0].split(".", 2)[2] for name in single} == {"attn.to_q", "attn.to_k", "attn.to_v"}
    lora_a = [p for n, p in unwrap(policy.transformer).named_parameters() if ".lora_A." in n]
    assert np.std(torch.cat([p.detach().flatten() for p in lora_a]).numpy()) == pytest.approx(1 / 3, rel=0.1)


def test_the_old_adapter_is_merged_where_it_is_the_active_one(tiny_flux_dir):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=3, alpha=6)
    add_old_adapter(policy)
    disturb(policy)
    with policy.old():
        before = sample(policy)
        with policy.merged():
            torch.testing.assert_close(sample(policy), before, rtol=0, atol=1e-4)
    assert not torch.allclose(sample(policy), before, atol=1e-4)


def test_reference_is_the_base_model_and_gradients_survive(tiny_flux_dir):
    policy = make(tiny_flux_dir)
    before = sample(policy)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    changed = sample(policy)
    assert (changed - before).abs().max() > 1e-3
    flags = [p.requires_grad for p in policy.transformer.parameters()]
    with policy.reference():
        assert torch.equal(sample(policy), before)
    assert torch.equal(sample(policy), changed)
    assert [p.requires_grad for p in policy.transformer.parameters()] == flags
    with pytest.raises(RuntimeError, match="inside"), policy.reference():
        raise RuntimeError("inside")
    assert torch.equal(sample(policy), changed)


def test_reference_without_adapter_is_an_error(tiny_flux_dir):
    with pytest.raises(ValueError, match="config.use_lora"), make(tiny_flux_dir).reference():
        pass


def test_old_adapter(tiny_flux_dir):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=2, alpha=4)
    disturb(policy)
    trainable = trainable_parameters(policy)
    add_old_adapter(policy)
    assert [id(p) for p in trainable_parameters(policy)] == [id(p) for p in trainable]
    first = sample(policy)
    start = [p.detach().clone() for p in trainable]
    disturb(policy, seed=1)
    second = sample(policy)
    with policy.old():
        assert torch.equal(sample(policy), first)
    assert torch.equal(sample(policy), second)
    assert [id(p) for p in trainable_parameters(policy)] == [id(p) for p in trainable]
    blend_old_adapter(policy, decay=0.25)
    old = [p for n, p in unwrap(policy.transformer).named_parameters() if ".old." in n]
    for mixed, before, now in zip(old, start, trainable, strict=True):
        torch.testing.assert_close(mixed, 0.25 * before + 0.75 * now.detach())


def test_old_adapter_decay():
    assert [old_adapter_decay(step, 0) for step in (0, 1, 1000)] == [0, 0, 0]
    assert [old_adapter_decay(step, 1) for step in (0, 100, 500, 9000)] == pytest.approx([0, 0.1, 0.5, 0.5])
    assert [old_adapter_decay(step, 2) for step in (0, 75, 175, 9000)] == pytest.approx([0, 0, 0.75, 0.999])
    with pytest.raises(ValueError, match="choose 0, 1 or 2"):
        old_adapter_decay(0, 3)


@pytest.mark.parametrize("save", [save_peft, save_diffusers])
def test_round_trip(tiny_flux_dir, tmp_path, save):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=4, alpha=10)
    disturb(policy)
    save(policy, tmp_path)
    again = make(tiny_flux_dir)
    add_lora(again, rank=64, alpha=1, lora_path=tmp_path)  # rank and alpha come from the file
    torch.testing.assert_close(sample(again), sample(policy), rtol=0, atol=1e-6)
    shapes = [p.shape for p in trainable_parameters(policy)]
    assert [p.shape for p in trainable_parameters(again)] == shapes
    add_old_adapter(again)
    save(again, tmp_path / "again")
    third = make(tiny_flux_dir)
    add_lora(third, lora_path=tmp_path / "again")
    torch.testing.assert_close(sample(third), sample(policy), rtol=0, atol=1e-6)


def test_plain_peft_reads_it(tiny_flux_dir, tmp_path):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=4, alpha=10)
    disturb(policy)
    save_peft(policy, tmp_path)
    other = make(tiny_flux_dir)
    other.transformer = PeftModel.from_pretrained(other.transformer, str(tmp_path))
    torch.testing.assert_close(sample(other), sample(policy), rtol=0, atol=1e-6)


def test_lora_weights_are_float32_on_a_low_precision_base(tiny_flux_dir):
    policy = make(tiny_flux_dir, dtype=torch.bfloat16)
    add_lora(policy, rank=2, alpha=4)
    assert {p.dtype for p in trainable_parameters(policy)} == {torch.float32}
    assert next(policy.transformer.x_embedder.parameters()).dtype == torch.bfloat16
    conditioning = policy.encode([Item(0, PROMPT)])
    latents = policy.initial_latents([1], 16, 16)
    policy.velocity(latents, torch.tensor([0.5]), conditioning, 16, 16).square().mean().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable_parameters(policy))


def test_bad_lora_paths(tiny_flux_dir, tmp_path):
    policy = make(tiny_flux_dir)
    with pytest.raises(PolicyLoadError, match="lora_path.*nowhere does not exist"):
        add_lora(policy, lora_path=tmp_path / "nowhere")
    with pytest.raises(PolicyLoadError, match="holds no LoRA. It needs pytorch_lora_weights.*adapter_config.json"):
        add_lora(policy, lora_path=tmp_path)
    other = make(build_tiny_flux(tmp_path / "other", width=48))
    add_lora(other, rank=2, alpha=2)
    save_peft(other, tmp_path / "peft")
    save_diffusers(other, tmp_path / "diffusers")
    with pytest.raises(PolicyLoadError, match="made for another model"):
        add_lora(make(tiny_flux_dir), lora_path=tmp_path / "peft")
    with pytest.raises(PolicyLoadError, match="does not fit this model"):
        add_lora(make(tiny_flux_dir), lora_path=tmp_path / "diffusers")


def test_a_pickle_is_not_read(tiny_flux_dir, tmp_path):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=2, alpha=2)
    save_peft(policy, tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(PolicyLoadError, match="holds no LoRA"):
        add_lora(make(tiny_flux_dir), lora_path=tmp_path)


def hub_cache(monkeypatch, folder, name, files):
    """A hub that is not reached, with ``files`` of ``name`` in its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, repository = "0" * 40, folder / f"models--{name.replace('/', '--')}"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for file in files:
        shutil.copy(file, repository / "snapshots" / commit)


@pytest.mark.parametrize("save", [save_peft, save_diffusers])
def test_adapters_of_the_hub(save, tiny_flux_dir, tmp_path, monkeypatch):
    policy = make(tiny_flux_dir)
    add_lora(policy, rank=2, alpha=2)
    disturb(policy)
    save(policy, tmp_path / "lora")
    hub_cache(monkeypatch, tmp_path / "cache", "someone/adapter", list((tmp_path / "lora").iterdir()))
    again = make(tiny_flux_dir)
    add_lora(again, lora_path="someone/adapter")
    for ours, theirs in zip(trainable_parameters(policy), trainable_parameters(again), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(PolicyLoadError, match="config.train.lora_path: cannot reach the model hub for 'someone/other'"):
        find_lora("someone/other")


def test_unknown_target(tiny_flux_dir):
    with pytest.raises(ValueError, match="no_such_layer"):
        add_lora(make(tiny_flux_dir), targets=["no_such_layer"])
