"""What an objective is: a function of one training step, and what it needs from the training loop.

    @objective(needs_noise_steps=False, gradient_steps=1)
    def my_objective(step: Step, policy: Policy, train: TrainOptions) -> LossOutput:
        ...
        return LossOutput(loss, {"my_metric": value})      # per sample, (B,) each

The trainer calls it once per step of a micro-batch and backpropagates immediately, so only one step's activations exist at a
time. It divides by the number of samples of all processes and by the number of steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import transition_at
from paco_grpo.sampling.sde import Transition
from paco_grpo.suggest import did_you_mean
from paco_grpo.types import NoiseStep, Rollout, to_device


@dataclass
class LossOutput:
    """What an objective returns."""

    loss: torch.Tensor  # (B,) float32
    # name → (B,), logged as the mean over samples and steps; of names that end in _max, the largest
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Step:
    """One step of the schedule for one micro-batch."""

    rollout: Rollout  # len B
    index: (
        int | float
    )  # position in rollout.sigmas; a float is a σ in (0, 1] that need not be in the schedule
    advantages: torch.Tensor  # (B,) float32, clipped to ±adv_clip_max
    group_weights: torch.Tensor | None = None  # (B,) float32, from ``Objective.group_weights``
    epoch_seed: int = 0  # ≥ 0, from seed, epoch and inner epoch, for noise that samples share
    inner_epoch: int = 0  # passes over the samples before this one, for each sample's own noise

    @property
    def sigma(self) -> torch.Tensor:
        """σ of this step, (B,) float32."""
        clean = self.rollout.clean_latents
        if isinstance(self.index, float):
            return torch.full((len(self.rollout),), self.index, device=clean.device)
        return to_device(self.rollout.sigmas[self.index], clean.device).expand(len(self.rollout))

    @property
    def minus_dt(self) -> float:
        """σ_i − σ_{i+1}, positive."""
        return float(self.rollout.sigmas[self.index] - self.rollout.sigmas[self.index + 1])

    @property
    def noise(self) -> NoiseStep:
        """The recorded step."""
        return self.rollout.noise_step(self.index)

    def transition(self, policy: Policy) -> Transition:
        """Distribution of x' at this noise step under the current weights."""
        return transition_at(policy, self.rollout, self.noise.latents, self.index)

    def reference_kl(self, policy: Policy, transition: Transition) -> torch.Tensor:
        """KL (B,) to the reference policy at this noise step: mean((μ − μ_ref)²)/(2s² + 1e-7) (Flow-GRPO, eq. 13)."""
        with torch.no_grad(), lora.reference(policy):
            reference = self.transition(policy)
        return mean_square(transition.mean - reference.mean) / (2 * transition.s.square() + 1e-7)


@dataclass(frozen=True)
class Snapshot:
    """A frozen copy of the LoRA that follows the trained one: copy ← decay·copy + (1 − decay)·trained."""

    name: str  # of the adapter and of its file in checkpoints; not default, trainable, ema, optimizer or start
    decay: Callable[
        [int, Any], float
    ]  # (optimizer steps so far, ``options.train``) → decay in [0, 1]
    samples_from: int | None = (
        None  # optimizer steps after which rollouts are sampled from it; None = never
    )
    every_step: bool = False  # it follows after every optimizer step, not once per epoch
    needed: Callable[[Any], bool] = lambda train: (
        True
    )  # ``options.train`` → whether the run keeps it at all


def recorded_steps(train: Any, rollout: Rollout, rng: np.random.Generator) -> list[int]:
    """The noise steps, or those of them in ``config.train.timesteps``."""
    return [
        s.index
        for s in rollout.noise_steps
        if train.timesteps is None or s.index in train.timesteps
    ]


def check_recorded_steps(options: Any) -> Iterable[str]:
    """``Objective.check`` of one that trains on noise steps."""
    sample, train = options.sample, options.train
    if not sample.noise_steps:
        yield f"sample.noise_steps is empty, but train.loss_type={train.loss_type!r} trains on them"
    if sample.noise_level == 0:
        yield f"sample.noise_level=0, but train.loss_type={train.loss_type!r} trains on noise steps"
    for index in train.timesteps or ():
        if index not in sample.noise_steps:
            yield f"train.timesteps has step {index}, which is not among sample.noise_steps"
    if train.timesteps is not None and sample.num_noise_steps is not None:
        yield "train.timesteps cannot be combined with sample.num_noise_steps: trained steps are those sampled"


def ratio_deviation(step: Step, policy: Policy, train: Any) -> torch.Tensor:
    """|ratio − 1| (B,) in units of a quarter of the clip range."""
    log_prob = step.transition(policy).log_prob(step.noise.next_latents)
    return ((log_prob - step.noise.log_prob).exp() - 1).abs() / (train.clip_range / 4)


@dataclass(frozen=True)
class Objective:
    """A loss and what it needs.

    Attributes:
        function: (step, policy, ``options.train``) → ``LossOutput``.
        needs_noise_steps: It recomputes recorded noise steps (log-probabilities). False: clean latents suffice, and
            sampling without noise is allowed.
        steps: (``options.train``, rollout, generator) → ``Step.index`` of each step. The generator is seeded by run and
            epoch alone, so all processes and a resumed run sample the same steps.
        snapshots: Adapters that the trainer keeps for it.
        gradient_steps: Optimizer steps an epoch where ``train.gradient_step_per_epoch`` is None.
        check: Options → problems, each beginning with the name of the option to change.
        first_pass: (step, policy, ``options.train``) → (B,) values without gradient, computed for all samples of an
            optimizer step before its first backward; ``group_weights`` turns them into ``Step.group_weights``.
        group_weights: (values (n, steps), item_ids (n,), advantages (n,), ``options.train``) → (n, steps), over the
            samples of all processes. Groups are then never split over optimizer steps.
        first_deviation: (step, policy, ``options.train``) → (B,): difference of a noise step from the recorded one. Above a
            mean of 1 before the first update, ``old_log_prob='auto'`` recomputes.
    """

    function: Callable[[Step, Policy, Any], LossOutput]
    needs_noise_steps: bool = True
    steps: Callable[[Any, Rollout, np.random.Generator], Sequence[int | float]] = recorded_steps
    snapshots: tuple[Snapshot, ...] = ()
    gradient_steps: int = 2
    check: Callable[[Any], Iterable[str]] = check_recorded_steps
    first_pass: Callable[[Step, Policy, Any], torch.Tensor] | None = None
    group_weights: Callable[[np.ndarray, np.ndarray, np.ndarray, Any], np.ndarray] | None = None
    first_deviation: Callable[[Step, Policy, Any], torch.Tensor] = ratio_deviation

    def __call__(self, step: Step, policy: Policy, train: Any) -> LossOutput:
        return self.function(step, policy, train)

    def for_run(self, train: Any) -> Objective:
        """With the snapshots that a run with ``options.train`` keeps."""
        return replace(
            self, snapshots=tuple(snapshot for snapshot in self.snapshots if snapshot.needed(train))
        )

    def sampling_snapshot(self, step: int) -> str | None:
        """Name of the snapshot that rollouts use after ``step`` optimizer steps; None = the trained weights."""
        return next(
            (
                s.name
                for s in self.snapshots
                if s.samples_from is not None and step >= s.samples_from
            ),
            None,
        )


def objective(**needs: Any) -> Callable[[Callable[[Step, Policy, Any], LossOutput]], Objective]:
    """Decorator that makes an ``Objective`` of a function, with these attributes."""
    return lambda function: Objective(function, **needs)


def with_kl(
    loss: torch.Tensor,
    metrics: dict[str, torch.Tensor],
    weight: float,
    kl: Callable[[], torch.Tensor],
) -> LossOutput:
    """``loss`` + ``weight``·KL, all (B,); the reference forward in ``kl`` happens only if the weight is not 0."""
    if weight != 0:
        metrics["kl"] = kl()
        loss = loss + weight * metrics["kl"]
    return LossOutput(loss, metrics)


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """Mean square (B,) over all but the batch dimension."""
    return values.square().flatten(1).mean(1)


OBJECTIVES: dict[str, str] = {
    "ppo": "paco_grpo.objectives.ppo:ppo",
    "guard_grpo": "paco_grpo.objectives.guard:guard_grpo",
    "nft": "paco_grpo.objectives.nft:nft",
    "flow_dppo": "paco_grpo.objectives.flow_dppo:flow_dppo",
    "awm": "paco_grpo.objectives.awm:awm",
    "dgpo": "paco_grpo.objectives.dgpo:dgpo",
}


def get_objective(name: str) -> Objective:
    """The objective called ``name``, or ``package.module:name``; a plain function is one with the default attributes."""
    target = OBJECTIVES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(
            f"config.train.loss_type={name!r} is unknown.{did_you_mean(name, OBJECTIVES)} Known: {', '.join(OBJECTIVES)}, "
            "or package.module:name"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config.train.loss_type={name!r} cannot be imported: {error}") from error
    return found if isinstance(found, Objective) else Objective(found)
