"""Work that is left out or done once: the same numbers, in fewer operations."""

from collections import Counter

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from tiny_policies import NAMES, disturb, items, load
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.policies import lora
from paco_grpo.policies.performance.flux import JointAttention
from paco_grpo.policies.performance.onednn import through_onednn
from paco_grpo.policies.performance.repeated import _cast_first, _cast_inputs
from paco_grpo.sampling.denoise import Sampling, rollout, transition_at

PROMPTS = ("make the star blue", "b", "a circle in place of the star")


class Casts(TorchDispatchMode):
    """Counts casts from float32 to bfloat16; ``weights`` by the address of what is cast."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def adapted(name, folder, dtype):
    policy = load(name, folder, dtype=dtype)
    lora.add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    return policy, policy.encode(items(name, *PROMPTS))


def velocity(policy, conditioning):
    latents, sigma = policy.initial_latents([1, 2, 3], 32, 32), torch.tensor([0.9, 0.5, 0.3])
    return policy.velocity(latents, sigma, conditioning, 32, 32)


def lora_gradients(policy, value):
    policy.transformer.zero_grad()
    value.square().mean().backward()
    gradients = [p.grad for p in lora.trainable_parameters(policy)]  # none where the last block's text would go
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def as_in_diffusers(policy, last_block=True):
    """Undo performance/flux.py: diffusers' processors, text tokens in the last block, and rotations of all tokens."""
    transformer = policy.transformer
    last = transformer.single_transformer_blocks[-1]
    for module in (last, last.norm):
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    for key in [k for k, hook in last.norm._forward_hooks.items() if hook is not _cast_first]:
        del last.norm._forward_hooks[key]
    if not last_block:
        last.attn.set_processor(JointAttention())
        return
    transformer.set_attn_processor(FluxAttnProcessor())

    def rotate_text_too(module, args, kwargs):
        text = kwargs["encoder_hidden_states"]
        return args, kwargs | {"txt_ids": kwargs["img_ids"].new_zeros(text.shape[1], 3)}

    transformer.register_forward_pre_hook(rotate_text_too, with_kwargs=True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["flux", "flux_kontext"])
def test_flux_leaves_out_what_nothing_reads(tiny_folder, name, checkpointing):
    policy, conditioning = adapted(name, tiny_folder(name), torch.float32)
    assert isinstance(policy.transformer, FluxTransformer2DModel)
    if checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    ours = velocity(policy, conditioning)
    gradients = lora_gradients(policy, ours)
    with torch.no_grad():  # rotates in place
        assert torch.equal(velocity(policy, conditioning), ours)
    as_in_diffusers(policy)
    theirs = velocity(policy, conditioning)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # a GPU may round products of another height otherwise
    torch.testing.assert_close(gradients, lora_gradients(policy, theirs), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["flux", "flux_kontext"])
def test_unrotated_text_has_the_same_bits(tiny_folder, name, dtype):
    policy, conditioning = adapted(name, tiny_folder(name), dtype)
    as_in_diffusers(policy, last_block=False)
    ours = velocity(policy, conditioning)
    gradients = lora_gradients(policy, ours)
    as_in_diffusers(policy)
    theirs = velocity(policy, conditioning)
    assert torch.equal(ours, theirs)
    # backward adds the gradients of text and image in another order
    torch.testing.assert_close(
        gradients, lora_gradients(policy, theirs), rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_input_is_cast_once(tiny_folder, name):
    policy, conditioning = adapted(name, tiny_folder(name), torch.bfloat16)
    for module in policy.transformer.modules():  # what CUDA's autocast does, unlike the CPU's
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
            module.register_forward_hook(lambda module, args, output: output.float())
    with Casts() as before:
        separately = velocity(policy, conditioning).detach()  # with gradient each layer casts for itself
    with Casts() as once, torch.no_grad():
        assert torch.equal(velocity(policy, conditioning), separately)
    assert len(once.addresses) < 0.85 * len(before.addresses)
    for module in policy.transformer.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if hook in (_cast_inputs, _cast_first)]:
                del hooks[key]
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = True
    plain = velocity(policy, conditioning)
    assert torch.equal(plain, separately)


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_casts_an_adapter_once(tiny_folder, name):
    policy, conditioning = adapted(name, tiny_folder(name), torch.bfloat16)
    arguments = (policy, conditioning, range(3), range(3), 32, 32)
    options = {"num_steps": 4, "noise_steps": (1,), "noise_level": 0.7}
    weights = {p.data_ptr() for p in lora.trainable_parameters(policy)}
    with Casts() as casts:
        ours = rollout(*arguments, Sampling(**options))
    cast = [address for address in casts.addresses if address in weights]
    assert len(cast) == len(set(cast)) > 0
    step = ours.noise_steps[0]
    trained = transition_at(policy, ours, step.latents, step.index).log_prob(step.next_latents)
    assert trained.requires_grad  # the kept casts, which have no gradient, are gone
    assert torch.equal(trained.detach(), step.log_prob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_computes_constant_parts_once(tiny_folder, name, dtype):
    policy = load(name, tiny_folder(name), dtype=dtype, negative_prompt=None)
    conditioning = policy.encode(items(name, *PROMPTS))
    parts, calls = policy.constant_parts(), []
    for part in parts:
        part.forward = lambda *args, forward=part.forward, **kwargs: calls.append(1) or forward(*args, **kwargs)
    arguments = (policy, conditioning, range(3), range(3), 32, 32)
    once = rollout(*arguments, Sampling(4))
    assert len(calls) == len(parts) > 0
    policy.constant_parts = tuple
    assert torch.equal(rollout(*arguments, Sampling(4)).clean_latents, once.clean_latents)
    assert len(calls) == 5 * len(parts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_layer_has_the_bits_of_peft(tiny_folder, name, dtype):
    policy, conditioning = adapted(name, tiny_folder(name), dtype)
    lora.add_snapshot(policy, "old")
    layers = [module for module in policy.transformer.modules() if hasattr(module, "lora_variant")]
    assert all(set(layer.lora_variant) == {"default", "old"} and layer.scaling["default"] == 2 for layer in layers)
    ours = velocity(policy, conditioning)
    with Operations() as count, torch.no_grad():
        velocity(policy, conditioning)
    gradients = lora_gradients(policy, ours)
    for layer in layers:
        layer.lora_variant.clear()
    with Operations() as in_peft, torch.no_grad():
        velocity(policy, conditioning)
    forwards = 2 if name == "qwen_image_edit" else 1  # true CFG
    assert in_peft.names["aten.mul.Tensor"] == count.names["aten.mul.Tensor"] + forwards * len(layers)
    theirs = velocity(policy, conditioning)
    for own, wanted in ((ours, theirs), (gradients, lora_gradients(policy, theirs))):
        if dtype == torch.bfloat16:
            assert torch.equal(own, wanted)
        else:  # added in place
            assert torch.allclose(own, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_merged_forwards_are_those_of_onednn(tiny_folder, name, monkeypatch):
    policy, conditioning = adapted(name, tiny_folder(name), torch.float32)
    before = [module.__dict__.get("forward") for module in policy.transformer.modules()]
    with torch.no_grad(), lora.merged(policy), through_onednn(policy), Operations() as count:
        ours = velocity(policy, conditioning)
    assert count.names["mkldnn._linear_pointwise.default"] > 10 and not count.names["aten.gelu.default"]
    assert not count.names["aten.addmm.default"] and not count.names["aten.mm.default"]
    assert before == [module.__dict__.get("forward") for module in policy.transformer.modules()]
    for module in policy.transformer.modules():
        module.__dict__.pop("forward", None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with torch.no_grad(), lora.merged(policy), through_onednn(policy), Operations() as count:
        theirs = velocity(policy, conditioning)
    assert not count.names["mkldnn._linear_pointwise.default"] and count.names["aten.gelu.default"]
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_frozen_layers_of_onednn_have_the_gradients_of_pytorch(tiny_folder, name):
    policy, conditioning = adapted(name, tiny_folder(name), torch.float32)
    with Operations() as count:
        ours = lora_gradients(policy, velocity(policy, conditioning))
    assert count.names["mkldnn._linear_pointwise.default"] > 20
    for module in policy.transformer.modules():
        module.__dict__.pop("forward", None)
    theirs = lora_gradients(policy, velocity(policy, conditioning))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
