"""Work that several consumers or forwards have in common, done once; no bit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux2 import Flux2FeedForward
from torch import nn


@contextmanager
def computed_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block each of ``modules`` computes once and then gives the same result: their inputs, weights and
    adapters must not change. For forwards without gradient."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced_forward(module, _Once(module.forward)))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """``module`` computes ``forward`` inside the block."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own again, unless the instance had one
        if before is not None:
            module.forward = before


class _Once:
    def __init__(self, compute: Callable) -> None:
        self._compute, self._result = compute, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._result is None:
            self._result = self._compute(*args, **kwargs)
        return self._result


def cast_inputs_once(transformer: nn.Module) -> None:
    """Under autocast, cast the input of an attention or a feed-forward once, not in each linear layer and adapter in it.

    With gradient nothing changes: there each layer's own cast sums the gradients of the input in float32.
    """
    for module in transformer.modules():
        if hasattr(module, "processor") or isinstance(module, FeedForward | Flux2FeedForward):
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        elif isinstance(module, AdaLayerNormZeroSingle):  # its output enters an attention and a linear layer
            module.register_forward_hook(_cast_first)


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    names = ("hidden_states", "encoder_hidden_states")
    return tuple(map(_cast, args)), {k: _cast(v) if k in names else v for k, v in kwargs.items()}


def _cast_first(module: nn.Module, args: tuple, output: tuple) -> tuple:
    return _cast(output[0]), *output[1:]


def _cast(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or torch.is_grad_enabled() or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
