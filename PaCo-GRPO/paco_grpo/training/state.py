"""The plan of a run, which follows from its options, and the state that training changes.

``training/checkpoints.py`` saves the state: weights, average, optimizer, progress.
"""

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch

from paco_grpo.distributed import Strategy
from paco_grpo.options import RunOptions, TrainOptions
from paco_grpo.policies.diffusers_policy import DiffusersPolicy


@dataclass(frozen=True)
class Plan:
    """Derived numbers of a run."""

    num_processes: int  # from the launcher
    prompts: int  # m, unique prompts an epoch over all processes, possibly raised
    images_per_prompt: int  # k
    samples: int  # m·k, images an epoch over all processes
    samples_per_process: int  # images an epoch on each process
    sample_batch_size: int  # images per rollout batch on each process
    rollout_batches: int  # an epoch on each process, when all images have one size
    gradient_steps: int  # optimizer steps in one pass over the epoch's samples
    notes: tuple[str, ...] = ()  # warnings for the log


def make_plan(options: RunOptions, num_processes: int, gradient_steps: int) -> Plan:
    """Derive the plan (docs/method.md §4).

    m is raised until m·k divides evenly over processes and batches.

    A batch larger than a process's share is first reduced to it, so that more processes need not
    mean more prompts. ``gradient_steps`` is the objective's default.
    """
    sample = options.sample
    fewest = sample.unique_sample_num_per_epoch
    k = sample.num_images_per_prompt
    batch = min(sample.batch_size, max(1, fewest * k // num_processes))
    # The number of prompts must be a multiple of this one.
    multiple = num_processes * batch // math.gcd(num_processes * batch, k)
    prompts = math.ceil(fewest / multiple) * multiple
    share = prompts * k // num_processes
    notes = []
    if prompts != fewest:
        notes.append(
            f"sample.unique_sample_num_per_epoch raised from {fewest} to {prompts}, so that {k} "
            f"images each divide evenly over {num_processes} processes in batches of {batch}"
        )
    gradient_steps = options.train.gradient_step_per_epoch or gradient_steps
    steps = gradient_steps * options.train.num_inner_epochs
    epoch, age = oldest_average(options.train, steps, options.num_epochs)
    if options.train.ema and age > oldest_allowed(epoch):
        notes.append(
            f"after epoch {epoch}, the average of the weights, which is evaluated and saved, is "
            f"{age:.1f} epochs old: lower config.train.ema_update_interval "
            f"({options.train.ema_update_interval})"
        )
    return Plan(
        num_processes=num_processes,
        prompts=prompts,
        images_per_prompt=k,
        samples=prompts * k,
        samples_per_process=share,
        sample_batch_size=batch,
        rollout_batches=share // batch,
        gradient_steps=gradient_steps,
        notes=tuple(notes),
    )


def merges_lora(options: RunOptions, device: torch.device) -> bool:
    """Whether steps without noise run with the LoRA merged into the base weights.

    bfloat16 would round most of a small update away; on a GPU, TF32 rounds more and a copy of the
    weights takes memory.
    """
    exact = (
        options.mixed_precision == "no"
        and device.type == "cpu"
        and options.pretrained.quantize is None
    )
    return exact and options.use_lora


def share_kept(step: int, decay: float, update_interval: int) -> float:
    """d of optimizer step number ``step``, the first is 1 (docs/method.md §6).

    The average becomes d·average + (1 − d)·weights. It does not move between the steps that are
    multiples of ``update_interval``.
    """
    if step % update_interval:
        return 1.0
    return min((1 + step) / (10 + step), decay)


def oldest_average(train: TrainOptions, steps: int, epochs: int) -> tuple[int, float]:
    """After which epoch the average is oldest, and how many epochs old it is then.

    Oldest compared with ``oldest_allowed``. The weights are taken to move as far in each of the
    ``steps`` optimizer steps of an epoch.
    """
    worst = (1, 0.0)
    average = 0.0  # in optimizer steps; the untrained weights are those of step 0
    # Later, the average falls behind no faster than the run gets longer.
    for epoch in range(1, min(epochs, 100) + 1):
        for step in range((epoch - 1) * steps + 1, epoch * steps + 1):
            kept = share_kept(step, train.ema_decay, train.ema_update_interval)
            average = kept * average + (1 - kept) * step
        age = epoch - average / steps
        if age / oldest_allowed(epoch) > worst[1] / oldest_allowed(worst[0]):
            worst = (epoch, age)
    return worst


def oldest_allowed(epoch: int) -> float:
    """Epochs that the average may lag behind the weights after ``epoch`` epochs, without a note."""
    return max(2, epoch / 8)


class EMA:
    """The average of the parameters: shadow ← d·shadow + (1 − d)·weight (``share_kept``)."""

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
        kept = share_kept(step, self.decay, self.update_interval)
        if kept < 1:
            for name, parameter in self.parameters.items():
                self.shadow[name].lerp_(parameter.detach().float(), 1 - kept)

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
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

    policy: DiffusersPolicy
    parameters: Mapping[str, torch.nn.Parameter]  # trainable, by name
    # Name of an adapter (``Objective.snapshots``) → its parameters.
    snapshots: Mapping[str, Mapping[str, torch.nn.Parameter]]
    ema: EMA | None  # of ``parameters``
    optimizer: torch.optim.Optimizer  # over ``parameters``
    strategy: Strategy  # how all this is spread over the processes
    optimizer_steps: int = 0  # taken so far
    # Whether old log-probabilities are recomputed before each update; None: not yet decided.
    must_recompute: bool | None = None
    epoch: int = 0  # finished epochs
    between_epochs: bool = True  # the weights are those after ``epoch`` epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """The averaged weights are in place inside the block."""
        return self.ema.applied() if self.ema else contextlib.nullcontext()

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """All weights that training changes, by the name of their file in a checkpoint."""
        weights: dict[str, Mapping[str, torch.Tensor]] = {"trainable": self.parameters}
        weights |= self.snapshots
        if self.ema:
            weights["ema"] = self.ema.shadow
        return weights
