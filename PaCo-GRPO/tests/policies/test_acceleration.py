"""Compiled blocks, attention back ends, offloading, bytes made by the VAE's device: the same numbers, on every policy."""

import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tiny_flux import build_tiny_flux
from tiny_policies import NAMES, disturb, items, load
from torch._dynamo.utils import counters

from paco_grpo.policies import acceleration as acc
from paco_grpo.policies.adapters import add_lora, add_old_adapter, merged, trainable_parameters
from paco_grpo.policies.offload import Offloaded


def ready(name, folder, targets=None):
    policy = load(name, folder)
    add_lora(policy, 4, 8, targets)
    add_old_adapter(policy)
    disturb(policy)
    return policy


def forward(policy, name, batch=2, size=32, gradient=False, inside=nullcontext):
    """The velocity, and the gradients of its mean square."""
    conditioning = policy.encode(items(name, *[f"{'long ' * i}prompt {i}" for i in range(batch)], size=(size, size)))
    latents = policy.initial_latents(list(range(batch)), size, size)
    with torch.set_grad_enabled(gradient), inside():
        velocity = policy.velocity(latents, torch.full((batch,), 0.7), conditioning, size, size)
        if gradient:
            velocity.square().mean().backward()
    gradients = [p.grad for p in trainable_parameters(policy)] if gradient else []
    for parameter in trainable_parameters(policy):
        parameter.grad = None
    return velocity.detach(), gradients


def one_epoch(policy, name):
    """What an epoch with evaluation asks of a transformer; returns all its numbers."""
    found = []
    for options in (
        {}, {"gradient": True}, {"inside": policy.old}, {"inside": policy.reference}, {"inside": policy.merged},
        {"batch": 3, "size": 64}, {"batch": 3, "gradient": True},
    ):  # fmt: skip
        velocity, gradients = forward(policy, name, **options)
        found += [velocity, *gradients]
    return found


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_compiled_again_after_the_first_epoch(tmp_path, checkpointing):
    """Dynamo's part alone (backend eager): it decides what is compiled anew, and the numbers stay the very same."""
    folder = build_tiny_flux(tmp_path / "flux", double_blocks=1, single_blocks=2)
    policy = ready("flux", folder, targets=["attn.to_q", "ff.net.2"])  # fewer layers to trace, of the same kinds
    expected = one_epoch(policy, "flux")
    if checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    names = [name for name, _ in policy.transformer.named_parameters()]
    torch._dynamo.reset()
    acc.compile_blocks(policy, backend="eager")
    assert acc.is_compiled(policy)
    assert [name for name, _ in policy.transformer.named_parameters()] == names
    assert all(torch.equal(a, b) for a, b in zip(one_epoch(policy, "flux"), expected, strict=True))
    counters.clear()
    disturb(policy, seed=1)  # an optimizer step
    one_epoch(policy, "flux")
    assert not counters["stats"].get("unique_graphs")
    assert not counters["graph_break"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_eager_to_rounding(tmp_path):
    policy = ready("flux", build_tiny_flux(tmp_path / "flux", double_blocks=1, single_blocks=1), ["attn.to_q"])
    cases = ({}, {"gradient": True})
    expected = [forward(policy, "flux", **case) for case in cases]
    torch._dynamo.reset()
    acc.compile_blocks(policy)
    for case, (velocity, gradients) in zip(cases, expected, strict=True):
        now, gradients_now = forward(policy, "flux", **case)
        torch.testing.assert_close(now, velocity, rtol=1e-4, atol=1e-5)
        for a, b in zip(gradients_now, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_a_missing_compiler_is_said(tiny_flux_dir, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(acc.AccelerationError, match="C\\+\\+ compiler"):
        acc.compile_blocks(load("flux", tiny_flux_dir))


@pytest.mark.parametrize("name", NAMES)
def test_attention_back_ends_agree(tiny_folder, name):
    policy = ready(name, tiny_folder(name))
    expected = forward(policy, name, gradient=True)
    acc.set_attention(policy, "_native_math")
    assert {
        module.processor._attention_backend for module in policy.transformer.modules() if hasattr(module, "processor")
    } == {"_native_math"}
    found = forward(policy, name, gradient=True)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_attention_back_ends_are_tried_before_use():
    assert acc.attention_problem("native") is None
    assert "Did you mean '_native_cudnn'" in acc.attention_problem("native_cudn")
    assert "has no backward" in acc.attention_problem("sage")
    for name in ("native", "_native_math"):
        acc.try_attention(name, torch.device("cpu"), torch.float32, masked=True)
    with pytest.raises(acc.AccelerationError, match="'_native_cudnn' does not work on cpu"):
        acc.try_attention("_native_cudnn", torch.device("cpu"), torch.float32, masked=False)


def weights_at(modules):
    return [t.data_ptr() for module in modules for t in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_encoders_come_to_work_and_leave(tiny_folder, name):
    """On a CPU, too, work is done on a copy: where the weights are is where their memory is."""
    plain, policy = load(name, tiny_folder(name)), load(name, tiny_folder(name))
    policy.offload(text_encoders=True, vae=True)
    assert policy.offloads_text_encoders and not plain.offloads_text_encoders
    modules = [*policy.text_encoders(), policy.pipeline.vae]
    home, seen, comings = weights_at(modules), [], []
    bring = Offloaded.at_work
    for module in modules:
        module.register_forward_pre_hook(lambda *_: seen.append(weights_at(policy.text_encoders())))
    policy._text_duty.at_work = lambda: comings.append(policy._text_duty._here) or bring(policy._text_duty)
    wanted = items(name, "one", "two", "three")
    conditioning = policy.encode(wanted)
    expected = plain.encode(wanted)
    assert torch.equal(conditioning.prompt_embeds, expected.prompt_embeds)
    assert seen and all(not set(at) & set(home) for at in seen), "computed with the weights at home"
    assert comings[0] is False and all(comings[1:]), "came once for all three"
    assert weights_at(modules) == home
    count = len(seen)
    policy.encode(wanted)
    assert len(seen) == count, "remembered texts need no encoder"
    latents = policy.initial_latents([1, 2], 32, 32)
    for ours, theirs in zip(policy.decode(latents, 32, 32), plain.decode(latents, 32, 32), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert weights_at(modules) == home


@pytest.mark.parametrize("name", NAMES)
def test_images_are_the_bytes_that_diffusers_makes(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    latents = 3 * policy.initial_latents([1, 2, 3], 32, 48)  # beyond the range of pixels, so that some are clamped
    unpacked = policy.pipeline._unpack_latents(latents, 32, 48, policy.pipeline.vae_scale_factor)
    with torch.no_grad():
        expected = policy.pipeline.image_processor.postprocess(policy._pixels(unpacked), output_type="pil")
    found = policy.decode(latents, 32, 48)
    assert [image.size for image in found] == [(48, 32)] * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.mode == "RGB" and np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_merging_loses_the_adapter_in_low_precision_and_not_in_float32(tiny_flux_dir):
    """Why sample.merge_lora is off by default: a bfloat16 weight has 8 bits, and an update of less than half the last of
    them is gone when it is merged."""
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = load("flux", tiny_flux_dir, dtype=dtype)
        add_lora(policy, 4, 8)
        disturb(policy, scale=1e-3)
        base = forward(policy, "flux", inside=policy.reference)[0]
        change = forward(policy, "flux")[0] - base
        with merged(policy):
            after = forward(policy, "flux")[0] - base
        errors[dtype] = float((after - change).norm() / change.norm())
    assert errors[torch.float32] < 1e-2
    assert errors[torch.bfloat16] > 0.1
