"""What a run minimizes: a class with a ``loss``, and what that loss needs from the training loop.

    class Reinforce(Objective):
        def loss(self, step, policy):
            noise = step.noise
            trained = transition(policy, step.rollout, noise.latents, step.index)
            log_prob = trained.log_prob(noise.next_latents)
            return LossOutput(-step.advantages * log_prob, {"log_prob_mean": log_prob})

The trainer (``training/update.py``) calls ``loss`` for one step of the schedule at a time and
backpropagates at once, so only one step's activations exist at a time.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.names import find_function
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import Transition, transition
from paco_grpo.types import NoiseStep, Rollout, to_device

OBJECTIVES: dict[str, str] = {
    "ppo": "paco_grpo.objectives.ppo:Ppo",
    "guard_grpo": "paco_grpo.objectives.guard:GuardGrpo",
    "nft": "paco_grpo.objectives.nft:Nft",
    "flow_dppo": "paco_grpo.objectives.flow_dppo:FlowDppo",
    "awm": "paco_grpo.objectives.awm:Awm",
    "dgpo": "paco_grpo.objectives.dgpo:Dgpo",
    "dpo": "paco_grpo.objectives.dpo:Dpo",
    "crd": "paco_grpo.objectives.crd:Crd",
    "opd": "paco_grpo.objectives.opd:Opd",
}


class LossOutput(NamedTuple):
    """What ``Objective.loss`` returns."""

    loss: torch.Tensor  # (B,) float32, per sample
    # Name → (B,), logged as the mean over samples and steps. Of names that end in _max, the largest
    # value is logged.
    metrics: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass
class Step:
    """One step of the schedule for the samples of one micro-batch."""

    rollout: Rollout  # len B
    index: int  # position in rollout.sigmas
    advantages: torch.Tensor  # (B,) float32, clipped to ±adv_clip_max
    weight: float = 1.0  # of each sample in the update: 1 / (kept samples · steps), 0 for a dummy
    # What ``Objective.per_group`` returns, by its name, (B,) float32; 1 for a dummy.
    group: Mapping[str, torch.Tensor] = field(default_factory=dict)
    epoch_seed: int = 0  # ≥ 0, from seed, epoch and inner epoch, for noise that samples share
    inner_epoch: int = 0  # passes over the samples before this one, for each sample's own noise
    # (B,) int64 on the CPU, the number of each sample's prompt set, or (1,) of all.
    datasets: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    # Velocities (B, L, C) without gradient that ``Noised`` has computed. ``loss`` finds those of
    # ``Objective.measure`` here.
    frozen: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    @property
    def sigma(self) -> torch.Tensor:
        """σ of this step, (B,) float32."""
        sigma = to_device(self.rollout.sigmas[self.index], self.rollout.clean_latents.device)
        return sigma.expand(len(self.rollout))

    @property
    def minus_dt(self) -> float:
        """σ_i − σ_{i+1}, positive."""
        return float(self.rollout.sigmas[self.index] - self.rollout.sigmas[self.index + 1])

    @property
    def noise(self) -> NoiseStep:
        """The recorded step."""
        return self.rollout.noise_step(self.index)


@dataclass
class MicroBatch:
    """Samples that share a forward. A dummy keeps processes in step and does not count."""

    samples: Sequence[Rollout]  # B rollouts of batch size 1
    positions: np.ndarray  # (B,) positions of the samples in the epoch, over all processes
    advantages: np.ndarray  # (B,) float64, clipped to ±adv_clip_max
    indices: Sequence[int]  # positions of the schedule to train on
    weight: float  # of each sample in the update: 1 / kept samples, 0 for a dummy
    epoch_seed: int = 0  # as in ``Step``
    inner_epoch: int = 0  # as in ``Step``
    is_dummy: bool = False
    datasets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # as in ``Step``
    group: Mapping[str, torch.Tensor] = field(default_factory=dict)  # (steps, B), as in ``Step``
    frozen: Sequence[Mapping[Hashable, torch.Tensor]] = ()  # of each step, as in ``Step``

    def build_steps(self) -> list[Step]:
        """The steps of the schedule to train on.

        This joins the samples in memory, which takes as much again. So steps are built when they
        are needed, and not kept.
        """
        rollout = Rollout.cat(self.samples)
        device = rollout.clean_latents.device
        advantages = torch.as_tensor(self.advantages, dtype=torch.float32)
        weight = self.weight / len(self.indices)
        steps = []
        for row, index in enumerate(self.indices):
            step = Step(rollout, index, to_device(advantages, device), weight)
            step.epoch_seed = self.epoch_seed
            step.inner_epoch = self.inner_epoch
            step.group = {name: to_device(rows[row], device) for name, rows in self.group.items()}
            step.datasets = torch.from_numpy(self.datasets)
            if self.frozen:
                step.frozen = dict(self.frozen[row])
            steps.append(step)
        return steps


@dataclass(frozen=True)
class Group:
    """The trained images of one item in an optimizer step, over all processes: K of them."""

    item_id: int
    advantages: np.ndarray  # (K,) float64, clipped to ±adv_clip_max
    measured: Mapping[str, np.ndarray]  # what ``Objective.measure`` returns, (K, steps) float64


@dataclass(frozen=True)
class Snapshot:
    """A copy of the LoRA without gradient, which the trainer moves after each epoch.

    copy ← decay·copy + (1 − decay)·trained. So decay 1 keeps the LoRA that training started from,
    and 0 the one before the current epoch. ``lora.using_adapter(policy, name)`` switches to it.
    """

    name: str  # of the adapter and of its file in a checkpoint, and not one of ``lora.py``
    decay: Callable[[int], float]  # optimizer steps so far → decay in [0, 1]
    # Optimizer steps after which rollouts use it; None = never. An objective on noise steps then
    # needs ``train.old_log_prob='rollout'``, because log-probabilities are the snapshot's.
    samples_from: int | None = None
    every_step: bool = False  # moved after each optimizer step instead of each epoch


class Objective:
    """A loss, and what it needs of sampling and training; one instance per run.

    Subclasses define ``loss``. What they override decides how images are sampled
    (``noise_steps``), which of them are trained (``keep``) and what a group's images know of each
    other (``whole_groups``, ``measure``, ``per_group``).

    Attributes:
        needs_noise_steps: The loss recomputes recorded noise steps. False: clean latents suffice,
            and sampling without noise is allowed.
        gradient_steps: Parts (one optimizer step each) of a pass over the samples, unless
            ``train.gradient_step_per_epoch`` is set. For several steps on the same samples, set
            ``train.num_inner_epochs``.
        whole_groups: The samples of a group are never split over optimizer steps, and ``measure``
            and ``per_group`` are called.
        options: All options of the run.
        train: ``options.train``.
        snapshots: Copies of the LoRA that the trainer keeps for the loss, decided in ``__init__``.
        adapters: LoRAs of files that the loss compares with, such as teachers, decided there, too:
            name → folder, file or hub name. ``lora.using_adapter(policy, name)`` switches to one.
    """

    needs_noise_steps = True
    gradient_steps = 2
    whole_groups = False

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.train = options.train
        self.snapshots: tuple[Snapshot, ...] = ()
        self.adapters: dict[str, str] = {}

    @classmethod
    def check(cls, options: RunOptions) -> Iterator[str]:
        """Yield problems that begin with the option to change, before weights are loaded.

        The base class checks the noise steps. A check of your own adds to it:
        ``yield from super().check(options)``.
        """
        if not cls.needs_noise_steps:
            return
        sample = options.sample
        train = options.train
        name = f"train.loss_type={train.loss_type!r}"
        if not sample.noise_steps:
            yield f"sample.noise_steps is empty, but {name} trains on them"
        if sample.noise_level == 0:
            yield f"sample.noise_level=0, but {name} trains on noise steps"
        for index in train.timesteps or ():
            if index not in sample.noise_steps:
                yield f"train.timesteps has step {index}, which is not among sample.noise_steps"
        if train.timesteps is not None and sample.num_noise_steps is not None:
            yield (
                "train.timesteps cannot be combined with sample.num_noise_steps: "
                "the sampled noise steps are trained"
            )

    def noise_steps(self, epoch: int) -> Sequence[int]:
        """The steps of the schedule that get noise in ``epoch``, the first being 0.

        All of ``sample.noise_steps``, or ``num_noise_steps`` of them: drawn at random or, with
        ``window_epochs``, neighbors that move on by ``window_stride`` until they are the last ones
        (MixGRPO, arXiv 2507.21802).
        """
        sample = self.options.sample
        candidates = sorted(set(sample.noise_steps))
        count = sample.num_noise_steps
        if count is None:
            return candidates
        if sample.window_epochs is not None:
            moved = epoch // sample.window_epochs * sample.window_stride
            first = min(moved, len(candidates) - count)
            return candidates[first : first + count]
        rng = np.random.default_rng([self.options.seed, epoch])
        return sorted(rng.choice(candidates, size=count, replace=False).tolist())

    def keep(self, advantages: np.ndarray, item_ids: np.ndarray) -> np.ndarray:
        """Which of an epoch's images are trained, (n,) bool: here all.

        Only these have forwards and count in the means of losses and metrics.

        Args:
            advantages: (n,) float64 of the images of all processes, without those that have none;
                not clipped.
            item_ids: (n,) images with equal ids are a group.
        """
        return np.ones(len(advantages), bool)

    @property
    def keeps_all(self) -> bool:
        """Whether ``keep`` is not overridden, so that every image with an advantage is trained."""
        return type(self).keep is Objective.keep

    def steps(self, rollout: Rollout, rng: np.random.Generator) -> Sequence[int]:
        """Positions of the schedule to train on: the noise steps that ``train.timesteps`` allows.

        ``rng`` is seeded by run and epoch alone, so all processes and a resumed run train on the
        same steps.
        """
        recorded = [noise_step.index for noise_step in rollout.noise_steps]
        if self.train.timesteps is None:
            return recorded
        return [index for index in recorded if index in self.train.timesteps]

    def measure(self, step: Step, policy: Policy) -> Mapping[str, torch.Tensor]:
        """Numbers (B,) of each sample that ``per_group`` needs, by name; called without gradient.

        Each optimizer step begins with it, for all samples and trained steps.
        """
        return {}

    def per_group(self, group: Group) -> Mapping[str, np.ndarray]:
        """What each of a group's K samples gets, by its name in ``Step.group``.

        (K, steps), or (K,) for all steps, or (1, steps) for all samples. Every process that has
        images of the optimizer step calls it for every group.
        """
        return {}

    def loss(self, step: Step, policy: Policy) -> LossOutput:
        """The loss and metrics of each sample at one step of the schedule, (B,) each."""
        raise NotImplementedError

    def first_deviation(self, step: Step, policy: Policy) -> torch.Tensor:
        """How far (B,) a noise step is from the recorded one before the first update.

        Above a mean of 1, ``train.old_log_prob='auto'`` recomputes old values. Here it is
        |ratio − 1| over a quarter of the clip range.
        """
        noise = step.noise
        trained = transition(policy, step.rollout, noise.latents, step.index)
        ratio = (trained.log_prob(noise.next_latents) - noise.log_prob).exp()
        return (ratio - 1).abs() / (self.train.clip_range / 4)

    def sampling_snapshot(self, step: int) -> str | None:
        """Name of the snapshot that rollouts use after ``step`` optimizer steps in all.

        None = the trained weights.
        """
        for snapshot in self.snapshots:
            if snapshot.samples_from is not None and step >= snapshot.samples_from:
                return snapshot.name
        return None


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """Mean square (B,) over all but the batch dimension."""
    return values.square().flatten(1).mean(1)


def reference_kl(step: Step, policy: Policy, trained: Transition) -> torch.Tensor:
    """KL (B,) to the reference policy at this noise step (Flow-GRPO, eq. 13).

    It is mean((μ − μ_ref)²)/(2s² + 1e-7), and costs a forward of the reference.
    """
    with torch.no_grad(), lora.reference_weights(policy):
        reference = transition(policy, step.rollout, step.noise.latents, step.index)
    return mean_square(trained.mean - reference.mean) / (2 * trained.s.square() + 1e-7)


def get_objective(name: str) -> type[Objective]:
    """The class of the objective called ``name``, or of ``package.module:name``.

    That may also be a function (step, policy, options, …) → ``LossOutput``, which becomes the
    ``loss`` of a class with the default attributes.

    Raises:
        ValueError: The name is unknown, or cannot be imported.
    """
    try:
        imported = find_function(OBJECTIVES.get(name, name), list(OBJECTIVES))
    except ValueError as error:
        raise ValueError(f"config.train.loss_type={error}") from error
    if isinstance(imported, type) and issubclass(imported, Objective):
        return imported
    return _objective_of(imported)


def create_objective(options: RunOptions) -> Objective:
    """The objective ``train.loss_type`` with the arguments ``train.loss_kwargs``.

    Raises:
        ValueError: There is none of this name, or it takes other arguments.
    """
    train = options.train
    objective_class = get_objective(train.loss_type)
    try:
        return objective_class(options, **train.loss_kwargs)
    except TypeError as error:
        raise ValueError(f"config.train.loss_kwargs={train.loss_kwargs}: {error}") from error


def _objective_of(function: Callable[..., LossOutput]) -> type[Objective]:
    class FunctionObjective(Objective):
        def __init__(self, options: RunOptions, **arguments: Any) -> None:
            super().__init__(options)
            inspect.signature(function).bind("step", "policy", options, **arguments)
            self.arguments = arguments

        @override
        def loss(self, step: Step, policy: Policy) -> LossOutput:
            return function(step, policy, self.options, **self.arguments)

    return FunctionObjective
