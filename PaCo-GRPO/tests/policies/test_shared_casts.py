"""Tokens that several layers of a block take are cast once: the same velocities, and gradients that
differ by less than bfloat16's rounding.
"""

from collections import Counter

import pytest
import torch
from tiny_policies import disturb, load, trainable_parameters, trained, velocity_of
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.estimate.fake_device import cuda_autocast
from paco_grpo.options import RunOptions
from paco_grpo.policies import adapters
from paco_grpo.policies.speed import compile_blocks

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
def test_compiled_blocks_cast_once_in_one_graph(tiny_flux_dir):
    policy = load("flux", tiny_flux_dir, **UNGUIDED, dtype=torch.bfloat16)
    adapters.add_lora(policy, 4, 8, ["attn.to_q", "ff.net.2"])  # fewer layers to trace
    disturb(policy)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad(), cuda_autocast():
        expected = velocity_of(policy, "flux", *PROMPTS)
        torch._dynamo.reset()
        counters.clear()
        compile_blocks(policy, backend)
        assert torch.equal(velocity_of(policy, "flux", *PROMPTS), expected)
    assert not counters["graph_break"]
    for graph in graphs:
        nodes = graph.graph.find_nodes(op="call_method", target="to")
        tokens = [node.args[0] for node in nodes if torch.bfloat16 in node.args]
        assert len(tokens) >= 2 and max(Counter(tokens).values()) == 1
        assert not any(node in graph.graph.output_node().args[0] for node in nodes)
