"""A base in 8 or 4 bits (bitsandbytes' CPU kernels): it trains, its bits stay, its LoRA fits the whole base."""

import sys
from contextlib import ExitStack

import diffusers
import pytest
import tiny_policies
import torch
from named import load as load_named
from tiny_run import rows_of, tiny_edit_options, tiny_options, train

from paco_grpo.options import ConfigError
from paco_grpo.policies import PolicyLoadError, load_policy, quantized
from paco_grpo.policies.adapters import add_lora, trainable_parameters
from paco_grpo.training.checks import check_run

KINDS = pytest.mark.parametrize("kind", quantized.KINDS)


def velocity_of(policy, name):
    items = tiny_policies.items(name, "a red fox", "two blue hats")
    latents = policy.initial_latents([1, 2], 32, 32)
    return policy.velocity(latents, torch.tensor([0.6, 0.6], device=policy.device), policy.encode(items), 32, 32)


def base_bits(policy):
    """Every stored number of the layers in few bits."""
    return {
        name: layer.weight.detach().clone()
        for name, layer in policy.transformer.named_modules()
        if quantized.is_quantized(layer)
    }


@KINDS
@pytest.mark.parametrize("name", tiny_policies.NAMES)
def test_velocity_is_near_the_whole_base_and_gradients_reach_the_lora(name, kind, tiny_folder):
    whole, small = (tiny_policies.load(name, tiny_folder(name), **o) for o in ({}, {"quantize": kind}))
    layers = dict(quantized.quantizable(whole.transformer))
    assert set(base_bits(small)) == set(layers) and len(layers) > 10
    with torch.no_grad():
        exact = velocity_of(whole, name)
        error = ((velocity_of(small, name) - exact).norm() / exact.norm()).item()
    assert 0 < error < (0.05 if kind == "int8" else 0.35), error
    add_lora(small, rank=4, alpha=8)
    tiny_policies.disturb(small)
    before = base_bits(small)
    velocity_of(small, name).square().sum().backward()
    parameters = trainable_parameters(small)
    gradients = [p.grad for p in parameters if p.grad is not None]  # Qwen's last text layers lead nowhere
    assert all(torch.isfinite(g).all() for g in gradients)
    assert sum(bool(g.abs().sum() > 0) for g in gradients) > 0.8 * len(parameters)
    for key, bits in base_bits(small).items():
        assert torch.equal(bits, before[key])


@pytest.mark.parametrize("merge", [False, True], ids=["lora beside", "lora merged"])
@pytest.mark.parametrize("name", tiny_policies.NAMES)
def test_int8_for_a_while_leaves_no_trace(name, merge, tiny_folder):
    policy = tiny_policies.load(name, tiny_folder(name))
    add_lora(policy, rank=4, alpha=8)
    tiny_policies.disturb(policy)
    modules, weights = dict(policy.transformer.named_modules()), dict(policy.transformer.named_parameters())
    bits = {key: weight.detach().clone() for key, weight in weights.items()}
    with torch.no_grad():
        exact = velocity_of(policy, name)
        with ExitStack() as stack:
            if merge:
                stack.enter_context(policy.merged())
            stack.enter_context(policy.in_int8())
            error = ((velocity_of(policy, name) - exact).norm() / exact.norm()).item()
            small = {key: each for key, each in policy.transformer.named_modules() if quantized.is_quantized(each)}
            assert {layer.weight.dtype for layer in small.values()} == {torch.int8}
        assert 0 < error < 0.05, error
        assert torch.equal(velocity_of(policy, name), exact)
    assert dict(policy.transformer.named_modules()) == modules  # modules are equal if they are the same object
    for key, weight in policy.transformer.named_parameters():
        assert weight is weights[key] and torch.equal(weight, bits[key])
    assert any(".attn." in key for key in small) and any("ff" in key or "mlp" in key for key in small)
    assert not any(part in key for key in small for part in ("norm", "_mod.", "lora_"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_int8_for_a_while_on_a_gpu(tiny_flux_dir):
    policy = tiny_policies.load("flux", tiny_flux_dir, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        exact = velocity_of(policy, "flux")
        with policy.in_int8():
            error = ((velocity_of(policy, "flux") - exact).norm() / exact.norm()).item()
        assert 0 < error < 0.1 and torch.equal(velocity_of(policy, "flux"), exact)


def test_int8_is_undone_after_an_error(tiny_flux_dir):
    policy = tiny_policies.load("flux", tiny_flux_dir)
    modules = dict(policy.transformer.named_modules())
    with pytest.raises(KeyError), policy.in_int8():
        raise KeyError
    assert dict(policy.transformer.named_modules()) == modules


@KINDS
def test_stored_bytes_are_those_of_the_library(kind, tiny_folder):
    whole, small = (tiny_policies.load("flux", tiny_folder("flux"), **o) for o in ({}, {"quantize": kind}))
    for name, layer in quantized.quantizable(whole.transformer):
        made = small.transformer.get_submodule(name)
        held = made.weight.numel() * made.weight.element_size()
        if kind == "nf4":
            state = made.weight.quant_state
            held += state.absmax.nbytes + state.state2.absmax.nbytes
        else:
            held += 4 * layer.out_features
        assert quantized.stored_bytes(layer, kind) == held


@KINDS
def test_a_run_starts_at_ratio_one_and_its_lora_fits_the_whole_base(kind, tiny_flux_dir, tmp_path):
    config = tiny_options(
        tiny_flux_dir, tmp_path, pretrained__quantize=kind, sample__merge_lora=False, num_epochs=1,
        train__batch_size=4, train__old_log_prob="rollout",
    )  # fmt: skip
    trainer = train(config)
    (row,) = rows_of(config, "train")
    assert row["train/ratio_deviation"] == 0.0
    assert row["train/grad_norm"] > 0
    trainer.run.state.policy.save_lora(tmp_path / "lora")
    pipeline = diffusers.FluxPipeline.from_pretrained(tiny_flux_dir)
    pipeline.load_lora_weights(tmp_path / "lora")
    again = tiny_policies.load("flux", tiny_flux_dir)
    add_lora(again, lora_path=tmp_path / "lora")
    for mine, theirs in zip(trainable_parameters(trainer.run.state.policy), trainable_parameters(again), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("editor", ["toy_kontext", "toy_qwen_edit"])
def test_editors_train_on_it(editor, tiny_folder, tmp_path):
    name = {"toy_kontext": "flux_kontext", "toy_qwen_edit": "qwen_image_edit"}[editor]
    config = tiny_edit_options(
        editor, tiny_folder(name), tmp_path, pretrained__quantize="nf4", sample__merge_lora=False, num_epochs=1,
        train__resolution=32, train__batch_size=4,
    )  # fmt: skip
    train(config)
    (row,) = rows_of(config, "train")
    assert row["train/ratio_deviation"] < 1e-5 and row["train/grad_norm"] > 0


def test_a_sample_does_not_depend_on_its_batch(tiny_flux_dir):
    policy = tiny_policies.load("flux", tiny_flux_dir, quantize="int8")
    latents, sigma = policy.initial_latents([1, 2], 32, 32), torch.tensor([0.6, 0.6])
    conditioning = policy.encode(tiny_policies.items("flux", "a red fox", "two blue hats"))
    with torch.no_grad():
        both = policy.velocity(latents, sigma, conditioning, 32, 32)
        alone = policy.velocity(latents[:1], sigma[:1], conditioning.select([0]), 32, 32)
    assert torch.allclose(both[:1], alone, atol=1e-5)


def test_merging_is_refused(tiny_flux_dir):
    policy = tiny_policies.load("flux", tiny_flux_dir, quantize="nf4")
    add_lora(policy, rank=4, alpha=8)
    with pytest.raises(ValueError, match=r"merge_lora=False"), policy.merged():
        pass


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("pretrained.quantize", "nf5")], "pretrained.quantize='nf5' is not known. Did you mean 'nf4'"),
        ([("pretrained.quantize", "nf4")], "sample.merge_lora=True cannot be used with pretrained.quantize='nf4'"),
        ([("pretrained.quantize", "int8"), ("use_lora", "0")], "needs use_lora=True"),
        ([("pretrained.quantize", "int8"), ("train.sharding", "fsdp2")], "train.sharding='fsdp2' cannot be used"),
        ([("pretrained.quantize", "int8"), ("speed.compile", "1")], "speed.compile=True was not tried"),
    ],
)
def test_contradictions_are_found_before_loading(pairs, said):
    with pytest.raises(ConfigError) as caught:
        check_run(load_named("toy_t2is", *pairs))  # toy_t2is merges
    assert f"config.{said}" in str(caught.value) or said in str(caught.value)


def test_a_missing_library_is_said_before_loading(tiny_flux_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PolicyLoadError, match=r"pip install 'paco-grpo\[quantize\]'"):
        load_policy(tiny_flux_dir, quantize="nf4")
    with pytest.raises(ConfigError, match=r"pretrained.quantize='nf4': bitsandbytes is not installed"):
        check_run(load_named("toy_t2is", ("pretrained.quantize", "nf4"), ("sample.merge_lora", "0")))
