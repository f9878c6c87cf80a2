"""Work that is left out or done once: the same numbers, in fewer operations."""

from types import MethodType

import pytest
import torch
from tiny_policies import NAMES, disturb, items, load
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.policies import lora
from paco_grpo.sampling.denoise import Sampling, rollout, transition_at

PROMPTS = ("make the star blue", "b", "a circle in place of the star")


class Casts(TorchDispatchMode):
    """Addresses of what is cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **kwargs)


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
    gradients = [p.grad for p in lora.trainable_parameters(policy)]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["flux", "flux_kontext"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flux_leaves_out_text_that_nothing_reads(tiny_folder, name, checkpointing, dtype):
    policy, conditioning = adapted(name, tiny_folder(name), dtype)
    if checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    last = policy.transformer.single_transformer_blocks[-1]
    sizes = []
    last.proj_out.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    ours = velocity(policy, conditioning)
    gradients = lora_gradients(policy, ours)
    last.forward = MethodType(type(last).forward, last)
    theirs = velocity(policy, conditioning)
    assert sizes[0] == sizes[-1] - conditioning.prompt_embeds.shape[1]
    low = dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if low else 2e-6)  # a GPU may round otherwise
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if low else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(gradients, lora_gradients(policy, theirs), **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_casts_an_adapter_once(tiny_folder, name):
    policy, conditioning = adapted(name, tiny_folder(name), torch.bfloat16)
    weights = {p.data_ptr() for p in lora.trainable_parameters(policy)}
    with Casts() as casts:
        ours = rollout(policy, conditioning, range(3), range(3), 32, 32, Sampling(4, (1,), 0.7))
    cast = [address for address in casts.addresses if address in weights]
    assert len(cast) == len(set(cast)) > 0
    step = ours.noise_steps[0]
    trained = transition_at(policy, ours, step.latents, step.index).log_prob(step.next_latents)
    assert trained.requires_grad  # the kept casts, which have no gradient, are gone
    assert torch.equal(trained.detach(), step.log_prob)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_layer_has_the_bits_of_peft(tiny_folder, name, dtype):
    policy, conditioning = adapted(name, tiny_folder(name), dtype)
    lora.add_snapshot(policy, "old")
    layers = [module for module in policy.transformer.modules() if hasattr(module, "lora_variant")]
    assert all(set(layer.lora_variant) == {"default", "old"} and layer.scaling["default"] == 2 for layer in layers)
    ours = velocity(policy, conditioning)
    gradients = lora_gradients(policy, ours)
    for layer in layers:
        layer.lora_variant.clear()
    theirs = velocity(policy, conditioning)
    assert torch.equal(ours, theirs) and torch.equal(gradients, lora_gradients(policy, theirs))
