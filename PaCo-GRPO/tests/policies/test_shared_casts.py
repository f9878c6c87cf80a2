"""Tokens that several layers of a block take are cast once: the same velocities, and gradients that
differ by less than bfloat16's rounding.
"""

from collections import Counter

import pytest
import torch
from tiny_policies import load, trainable_parameters, trained, velocity_of
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.estimate.fake_device import cuda_autocast
from paco_grpo.options import RunOptions
from paco_grpo.policies import adapters
from paco_grpo.policies.speed import SharedCasts, compile_blocks, share_casts

PROMPTS = ("a quiet red fox", "two loud clocks")  # of equal length, as one family needs
# One forward for a velocity: without true CFG, whose two forwards take the same latents.
UNGUIDED = {"guidance_scale": 0.0, "negative_prompt": None}
LAYERS_SHARE_TOKENS = (
    "flux",
    "flux2",
    "flux2_klein",
    "longcat_image_edit",
    "qwen_image",
    "qwen_image_edit_plus",
    "qwen_image_21",
    "stable_diffusion_3",
)
# The norms of these return the data type of their input, so that there is nothing to cast.
NOTHING_TO_CAST = ("krea2", "z_image")


class Casts(TorchDispatchMode):
    """Counts how often each tensor of tokens (B, N, C) is cast from float32."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self._tokens = []  # of which no other tensor gets the id while they are kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            return out
        tokens = args[0]
        if tokens.ndim == 3 and (tokens.dtype, out.dtype) == (torch.float32, torch.bfloat16):
            self._tokens.append(tokens)
            self.counts[id(tokens)] += 1
        return out


def without_shared_casts(monkeypatch, name, folder, **options):
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "share_casts", lambda transformer: None)
        return trained(name, folder, **UNGUIDED, **options)


def forward(policy, name):
    """The velocity, the gradients of its mean square as one vector, and the casts."""
    velocity_of(policy, name, *PROMPTS)  # encodes the texts, which are cached
    parameters = trainable_parameters(policy)
    with cuda_autocast(), Casts() as casts:
        velocity = velocity_of(policy, name, *PROMPTS)
        gradients = torch.autograd.grad(
            velocity.square().mean(), parameters, allow_unused=True, materialize_grads=True
        )
    return velocity.detach(), torch.cat([g.flatten() for g in gradients]), casts.counts


def distance(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", LAYERS_SHARE_TOKENS + NOTHING_TO_CAST)
def test_tokens_are_cast_once(name, tiny_folder, monkeypatch):
    folder = tiny_folder(name)
    _, exact, _ = forward(trained(name, folder, **UNGUIDED), name)
    separate = without_shared_casts(monkeypatch, name, folder, dtype=torch.bfloat16)
    velocity, gradients, casts = forward(separate, name)
    shared = trained(name, folder, **UNGUIDED, dtype=torch.bfloat16)
    shared_velocity, shared_gradients, shared_casts = forward(shared, name)
    assert torch.equal(shared_velocity, velocity)
    assert max(shared_casts.values()) == 1
    if name in NOTHING_TO_CAST:
        assert shared_casts.total() == casts.total()
        assert torch.equal(shared_gradients, gradients)
    else:
        assert max(casts.values()) >= 4
        assert shared_casts.total() < 0.6 * casts.total()
        change = distance(shared_gradients, gradients)
        assert 0 < change < 0.4 * distance(gradients, exact)


def test_tokens_are_cast_once_before_layers_in_4_bits(tiny_flux_dir, monkeypatch):
    options = {"dtype": torch.bfloat16, "quantize": "nf4"}
    separate = without_shared_casts(monkeypatch, "flux", tiny_flux_dir, **options)
    velocity, _, casts = forward(separate, "flux")
    shared = trained("flux", tiny_flux_dir, **UNGUIDED, **options)
    shared_velocity, _, shared_casts = forward(shared, "flux")
    assert torch.equal(shared_velocity, velocity)
    assert max(casts.values()) > 1 == max(shared_casts.values())


class AddsInPlace(torch.nn.Module):
    """Changes its tokens between the two layers that take them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, tokens):
        first = self.layers[0](tokens)
        tokens += 3
        return first - self.layers[1](tokens)


def test_tokens_that_a_block_changes_in_place_are_cast_again():
    block = AddsInPlace()
    tokens = torch.linspace(-2, 2, 12).view(1, 3, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = block(tokens.clone())
        share_casts(block)
        assert torch.equal(block(tokens.clone()), expected)


def test_tokens_are_cast_once_without_lora(tiny_flux_dir):
    policy = load("flux", tiny_flux_dir, **UNGUIDED, dtype=torch.bfloat16)
    options = RunOptions(use_lora=False, enable_gradient_checkpointing=False)
    adapters.add_adapters(policy, options, [], {})
    assert max(forward(policy, "flux")[2].values()) == 1


def test_recomputed_blocks_have_the_same_gradients(tiny_flux_dir):
    policy = trained("flux", tiny_flux_dir, **UNGUIDED, dtype=torch.bfloat16)
    velocity, gradients, _ = forward(policy, "flux")
    policy.transformer.enable_gradient_checkpointing()
    velocity_again, gradients_again, casts = forward(policy, "flux")
    assert torch.equal(velocity_again, velocity) and torch.equal(gradients_again, gradients)
    assert max(casts.values()) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux", "flux2_klein"])
def test_blocks_compile_to_one_graph(name, tiny_folder):
    policy = trained(name, tiny_folder(name), **UNGUIDED, dtype=torch.bfloat16)
    with torch.no_grad(), cuda_autocast():
        expected = velocity_of(policy, name, *PROMPTS)
        torch._dynamo.reset()
        counters.clear()
        compile_blocks(policy, backend="eager")
        assert torch.equal(velocity_of(policy, name, *PROMPTS), expected)
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]


def test_a_compiled_graph_casts_once():
    cast = torch.ops.prims.convert_element_type.default

    def function(x, y):
        parts = [cast(x, torch.bfloat16), cast(y, torch.bfloat16), cast(x, torch.float16)]
        return *parts, cast(x, torch.bfloat16) * 3

    tokens = torch.rand(2, 3), torch.rand(2, 3)
    graph = make_fx(function)(*tokens)
    expected = graph(*tokens)
    assert len(graph.graph.find_nodes(op="call_function", target=cast)) == 4
    SharedCasts()(graph.graph)
    graph.recompile()
    assert len(graph.graph.find_nodes(op="call_function", target=cast)) == 3
    for ours, theirs in zip(graph(*tokens), expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
