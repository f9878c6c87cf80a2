"""What training changes and ``checkpoint`` saves: weights, average, optimizer, progress."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from paco_grpo.data.sampler import GroupSampler
from paco_grpo.distributed.processes import Strategy
from paco_grpo.policies import Policy


class EMA:
    """The average of the parameters: shadow ← d·shadow + (1 − d)·weight.

    d = min((1+s)/(10+s), decay), where s counts optimizer steps. The average moves at every
    ``update_interval``-th of them (docs/method.md §6).
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], decay: float, update_interval: int
    ) -> None:
        self.parameters = dict(parameters)
        self.decay = decay
        self.update_interval = update_interval
        self.shadow = {name: p.detach().clone().float() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after optimizer step number ``step`` (the first is 1)."""
        if step % self.update_interval == 0:
            decay = min((1 + step) / (10 + step), self.decay)
            for name, parameter in self.parameters.items():
                self.shadow[name].lerp_(parameter.detach().float(), 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside the block, and their former values after it."""
        trained = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(trained)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


@dataclass
class TrainState:
    """Everything that training changes."""

    policy: Policy
    parameters: Mapping[str, torch.nn.Parameter]  # trainable, by name
    # Name of an adapter (``Objective.snapshots``) → its parameters.
    snapshots: Mapping[str, Mapping[str, torch.nn.Parameter]]
    ema: EMA | None  # of ``parameters``
    optimizer: torch.optim.Optimizer  # over ``parameters``
    strategy: Strategy  # how all this is spread over the processes
    sampler: GroupSampler
    optimizer_steps: int = 0  # taken so far
    # Whether old log-probabilities are recomputed before each update; None: not yet decided.
    must_recompute: bool | None = None
    epoch: int = 0  # finished epochs
    between_epochs: bool = True  # the weights are those after ``epoch`` epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints

    def averaged(self) -> contextlib.AbstractContextManager:
        """The averaged weights are in place inside the block."""
        return self.ema.applied() if self.ema else contextlib.nullcontext()

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """All weights that training changes, by the name of their file in a checkpoint."""
        weights = {"trainable": self.parameters, **self.snapshots}
        if self.ema:
            weights["ema"] = self.ema.shadow
        return weights
