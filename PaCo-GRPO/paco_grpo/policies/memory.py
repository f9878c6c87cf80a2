"""The same model in less memory: offloaded encoders, cached inputs, a base in 4 bits."""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Offloaded:
    """Keeps the weights of ``modules`` on the CPU, and copies them inside ``on_device``.

    If the modules never left the CPU, its tensors are the loaded ones: mapped files that all
    processes of a machine share. On leaving, only the copies are dropped.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        tensors: dict[int, torch.Tensor] = {}
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                tensors[id(tensor)] = tensor
        self._originals = [(tensor, tensor.data.cpu()) for tensor in tensors.values()]
        self._depth = 0  # of nested blocks
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The modules are on ``device`` inside the block; blocks may be nested."""
        if not self._depth:
            for tensor, original in self._originals:
                tensor.data = original.to(self.device, copy=True)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._leave()

    def _leave(self) -> None:
        for tensor, original in self._originals:
            tensor.data = original


def fits_beside_training(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether half of the memory of the GPU ``device`` stays free with ``modules`` on it.

    Activations and the optimizer need the rest.
    """
    parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
    num_bytes = sum(p.nbytes for p in parameters if p.device.type != device.type)
    free, total = torch.cuda.mem_get_info(device)
    fits = free - num_bytes >= total / 2
    logger.info(
        "text encoders (%.1f GB) %s: %.1f of %.1f GB are free (config.speed.offload_text)",
        num_bytes / 1e9,
        "stay on the GPU" if fits else "are in main memory between uses",
        free / 1e9,
        total / 1e9,
    )
    return fits


class TensorCache:
    """Tensors, or tuples, lists and dicts with tensors, by key.

    They have ``max_bytes`` in total (but there is at least one entry).

    The least recently used entries go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The tensors of ``key``: cached ones, or the result of ``compute``, moved to the CPU."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = tree_map_only(torch.Tensor, torch.Tensor.cpu, compute())
        self._entries[key] = entry
        self.num_bytes += _num_bytes(entry)
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)
        return entry


def _num_bytes(entry: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor))


# The frozen base of a transformer in 4 bits under a float32 LoRA (QLoRA, arXiv 2305.14314), with
# bitsandbytes' layers. Not through diffusers' ``BitsAndBytesConfig``: it refuses machines without a
# GPU, and to leave out the transformer's ``proj_out`` it leaves out those of all blocks (2.7 GB of
# FLUX.1-dev).


def quantizable(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside the blocks of ``module``, by name, without those of adapters.

    Embedders and the output projection are small, and their errors would reach every token.
    """
    for list_name, blocks in module.named_children():
        if isinstance(blocks, nn.ModuleList):
            for name, layer in blocks.named_modules():
                if type(layer) is nn.Linear and "lora_" not in name:
                    yield f"{list_name}.{name}", layer


def quantize_layers(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replace every ``quantizable`` layer in place by one in nf4 (4.13 bits a weight).

    One layer at a time is moved to ``device``. ``module`` is frozen, in ``dtype`` (the computing
    precision) and without adapters; it may still be on the CPU.
    """
    for name, layer in list(quantizable(module)):
        module.set_submodule(name, _quantized(layer, dtype).to(device))
    module.is_loaded_in_4bit = True  # peft chooses its kind of LoRA layer by it


def _quantized(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    with torch.device("meta"):  # no second full-size weight
        quantized = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
        )
    # It would repack the weights at the first forward without gradient.
    quantized.support_avx512bf16_for_cpu = False
    quantized.weight = bnb.nn.Params4bit(
        layer.weight.detach(), requires_grad=False, quant_type="nf4", module=quantized
    )
    quantized.bias = layer.bias
    quantized.register_forward_pre_hook(_cast_input_as_autocast)
    return quantized.eval()


def _cast_input_as_autocast(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """As autocast casts for a linear layer: bitsandbytes computes in its input's precision."""
    x = inputs[0]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *inputs[1:])
