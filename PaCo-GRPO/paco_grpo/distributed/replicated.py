"""The default strategy: every process holds all weights and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from paco_grpo.distributed.collectives import shard_like, sum_gradients
from paco_grpo.policies.base import Policy

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class Replicated:
    """How weights, gradients and optimizer states are spread over the processes; the mathematics does not depend on it.

    Losses are divided by the number of kept samples of all processes before they come here, so a strategy *sums*
    gradients. This one sums them once per optimizer step: LoRA gradients are small, so one message costs less than
    hooks on every backward.

    Attributes:
        name: For the log and plan.json.
        collective_forwards: A forward is a collective operation, so every process must run equally many.
        collective_backwards: The same for backwards.
    """

    name = "replicated"
    collective_forwards = False
    collective_backwards = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def loading_device(self) -> torch.device:
        """Where the generator is loaded before ``place``."""
        return self.accelerator.device

    def place(self, policy: Policy) -> None:
        """Move a policy with its adapters from ``loading_device`` to where it computes."""

    def prepare(self, policy: Policy, parameters: Sequence[torch.nn.Parameter], make: MakeOptimizer) -> Any:
        """The optimizer over ``parameters``, built by ``make``."""
        return make(parameters)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of ``loss``; ``last``: the optimizer step comes next."""
        loss.backward()

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], finite: torch.Tensor, max_norm: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of all processes in place and clip them; nothing is read from the device.

        Args:
            parameters: With gradients.
            finite: 0-dim bool tensor: whether all losses of this process are finite.
            max_norm: The gradients are scaled down to this norm.

        Returns:
            Whether ``finite`` was true on every process, and the norm before clipping (0-dim tensors).
        """
        finite = sum_gradients(self.accelerator, parameters, finite)
        return finite, torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: Any) -> None:
        """One optimizer step with the gradients of ``finish_gradients``, which are cleared."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self, optimizer: Any) -> None:
        """Clear the gradients without a step."""
        optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self, optimizer: Any) -> Mapping[str, Any]:
        """The optimizer's ``state_dict``; tensors may be sharded over processes."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Restore a ``state_dict`` whose tensors are whole and on the CPU."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, entries in saved["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                    entries[name] = shard_like(value, parameters[index])
        optimizer.load_state_dict(saved)
