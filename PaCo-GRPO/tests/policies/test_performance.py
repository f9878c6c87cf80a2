"""Compiled blocks, attention backends and offloading compute the same numbers."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from tiny_policies import disturb, items, load, trainable_parameters, velocity_of
from torch._dynamo.utils import counters

from paco_grpo.estimate.fake_device import cuda_autocast
from paco_grpo.options import ConfigError
from paco_grpo.policies import adapters, lora
from paco_grpo.policies.memory import fits_beside_training
from paco_grpo.policies.speed import attention_problem, compile_blocks, set_attention


def ready(name, folder, targets="default"):
    policy = load(name, folder)
    adapters.add_lora(policy, 4, 8, targets)
    lora.add_snapshot(policy, "old")
    disturb(policy)
    return policy


def forward(policy, name, batch=2, size=32, gradient=False, inside=nullcontext):
    """The velocity and, if asked for, the gradients of its mean square."""
    prompts = [f"{'long ' * i}prompt {i}" for i in range(batch)]
    parameters = trainable_parameters(policy)
    with torch.set_grad_enabled(gradient), inside():
        velocity = velocity_of(policy, name, *prompts, size=size)
        gradients = ()
        if gradient:
            gradients = torch.autograd.grad(
                velocity.square().mean(), parameters, allow_unused=True, materialize_grads=True
            )
    return velocity.detach(), *gradients


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def one_epoch(policy, name):
    """All kinds of forwards of an epoch with evaluation; returns all numbers."""
    cases = (
        {},
        {"gradient": True},
        {"inside": partial(lora.using_adapter, policy, "old")},
        {"inside": partial(lora.using_adapter, policy, "teacher")},
        {"inside": partial(lora.reference_weights, policy)},
        {"inside": partial(lora.merged, policy)},
        {"batch": 3, "size": 64},
        {"batch": 3, "gradient": True},
    )
    return [value for case in cases for value in forward(policy, name, **case)]


@pytest.mark.long
def test_nothing_is_compiled_again_after_the_first_epoch(tiny_flux_dir, tmp_path):
    """With dynamo alone (backend eager), which decides what is compiled again.

    A teacher has other layers. Few of them have a LoRA, which makes tracing shorter.
    """
    teacher = ready("flux", tiny_flux_dir, targets=["attn.to_v", "ff.net.2"])
    adapters.save_peft(teacher, tmp_path)
    policy = ready("flux", tiny_flux_dir, targets=["attn.to_q", "ff.net.2"])
    adapters.add_frozen_lora(policy, "teacher", tmp_path, "option")
    expected = one_epoch(policy, "flux")
    policy.transformer.enable_gradient_checkpointing()
    names = [name for name, _ in policy.transformer.named_parameters()]
    torch._dynamo.reset()
    compile_blocks(policy, backend="eager")
    assert [name for name, _ in policy.transformer.named_parameters()] == names
    for ours, theirs in zip(one_epoch(policy, "flux"), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    counters.clear()
    disturb(policy, seed=1)  # an optimizer step
    one_epoch(policy, "flux")
    assert not counters["stats"].get("unique_graphs")
    assert not counters["graph_break"]


def test_a_missing_attention_kernel_is_reported(tiny_flux_dir):
    assert attention_problem("native") is None
    assert attention_problem("_native_cudnn").startswith("'_native_cudnn'")
    with pytest.raises(ConfigError, match="'flash'"):  # no package
        set_attention(load("flux", tiny_flux_dir), "flash")


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
def test_attention_backends_agree(tiny_folder, name):
    policy = ready(name, tiny_folder(name))
    expected = forward(policy, name, gradient=True)
    set_attention(policy, "_native_math")
    processors = [
        module.processor for module in policy.transformer.modules() if hasattr(module, "processor")
    ]
    assert {processor._attention_backend for processor in processors} == {"_native_math"}
    assert_close(forward(policy, name, gradient=True), expected)


def test_flex_attention_takes_float32_queries_and_keys(tiny_flux_dir, monkeypatch):
    """Autocast casts the inputs of F.scaled_dot_product_attention alone."""
    policy = load("flux", tiny_flux_dir, dtype=torch.bfloat16)
    (expected,) = forward(policy, "flux", inside=cuda_autocast)
    set_attention(policy, "flex")
    backends = _AttentionBackendRegistry._backends
    dtypes = []
    compute = backends[AttentionBackendName("flex")]

    def recorded(query, key, value, **others):
        dtypes.extend((query.dtype, key.dtype, value.dtype))
        return compute(query=query, key=key, value=value, **others)

    monkeypatch.setitem(backends, AttentionBackendName("flex"), recorded)
    (found,) = forward(policy, "flux", inside=cuda_autocast)
    assert set(dtypes) == {torch.bfloat16}
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # it rounds elsewhere


def addresses(modules):
    return [t.data_ptr() for module in modules for t in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("name", ["flux_kontext", "qwen_image_edit"])
def test_offloaded_encoders_are_copied_to_work(tiny_folder, name):
    """On a CPU, too, the work is done on a copy, which has other addresses."""
    plain = load(name, tiny_folder(name))
    policy = load(name, tiny_folder(name))
    modules = [*policy.text_encoders(), policy.pipeline.vae]
    home = addresses(modules)
    policy.offload(text_encoders=True, vae=True)
    assert addresses(modules) == home, "loaded weights are mapped files, which processes share"
    seen = []
    for module in policy.text_encoders():
        module.register_forward_pre_hook(lambda *_: seen.append(addresses(policy.text_encoders())))
    conditioning = policy.encode(items(name, "one", "two", "three"))
    expected = plain.encode(items(name, "one", "two", "three"))
    assert torch.equal(conditioning.prompt_embeds, expected.prompt_embeds)
    assert seen and not set(seen[0]) & set(home), "computed with the weights at home"
    assert all(at == seen[0] for at in seen), "copied once for all three"
    assert addresses(modules) == home
    latents = policy.initial_latents([1, 2], 32, 32)
    ours, theirs = (loaded.decode(latents, 32, 32) for loaded in (policy, plain))
    assert [image.tobytes() for image in ours] == [image.tobytes() for image in theirs]
    assert addresses(modules) == home


@pytest.mark.parametrize(
    ("device", "free_gb", "fits"),
    [("cuda:0", 41, True), ("cuda:0", 40, False), ("meta", 40, True)],
)
def test_encoders_stay_on_a_gpu_that_keeps_half_of_its_memory(monkeypatch, device, free_gb, fits):
    # 1 GB, on the device "meta" already
    encoder = torch.nn.Linear(1000, 250_000, bias=False, device="meta")
    gigabytes = (free_gb * 10**9, 80 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: gigabytes)
    assert fits_beside_training([encoder], torch.device(device)) is fits
