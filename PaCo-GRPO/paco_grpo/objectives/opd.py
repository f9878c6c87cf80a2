"""Diffusion-OPD (arXiv 2605.15055): the student learns its teachers' steps at its own states.

| paper  | here                                                        |
|--------|-------------------------------------------------------------|
| μ_S    | student.mean (B, L, C), of the trained weights              |
| μ_T    | mean of the teacher of the sample's prompt set              |
| σ̄      | student.std (B,)                                            |
| x_j    | the recorded latents of a noise step                        |

A teacher is an adapter, of any rank and layers (``train.opd_teachers``). Rewards are monitored only.
"""

from collections.abc import Iterator

import torch
from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Objective, Step, mean_square, reference_kl
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import transition
from paco_grpo.types import to_device


class Opd(Objective):
    """mean((μ_S − μ_T)²)/(2σ̄²), the KL divergence of the two steps, + β·KL to the reference.

    Metrics: teacher_kl and, with β ≠ 0, kl.
    """

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        teachers = options.train.opd_teachers
        names = [name for name in options.datasets if name in teachers] or list(teachers)
        self.adapters = {f"teacher_{name}": teachers[name] for name in names}
        # Where a forward is a collective operation, every process takes part in each teacher's.
        self.runs_each_teacher = options.train.sharding is not None

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        teachers = options.train.opd_teachers
        if options.datasets and teachers.keys() != options.datasets.keys():
            yield (
                f"train.opd_teachers names {', '.join(teachers) or 'nothing'}: it needs an adapter "
                f"for each of the datasets {', '.join(options.datasets)}"
            )
        elif not options.datasets and len(teachers) != 1:
            yield (
                f"train.opd_teachers has {len(teachers)} adapters: a run with one prompt set needs "
                "one, such as --config.train.opd_teachers.NAME=ADAPTER"
            )

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        student = transition(policy, step.rollout, step.noise.latents, step.index)
        distance = mean_square(student.mean - self.teacher_mean(step, policy))
        loss = distance / (2 * student.std.square())
        metrics = {"teacher_kl": loss}
        if train.beta != 0:
            metrics["kl"] = reference_kl(step, policy, student)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)

    @torch.no_grad()
    def teacher_mean(self, step: Step, policy: Policy) -> torch.Tensor:
        """μ_T (B, L, C) of each sample's teacher."""
        latents = step.noise.latents
        means = torch.zeros_like(latents)
        for number, name in enumerate(self.adapters):
            has_teacher = step.datasets == number
            if self.runs_each_teacher or has_teacher.any():
                with lora.using_adapter(policy, name):
                    teacher = transition(policy, step.rollout, latents, step.index)
                rows = to_device(has_teacher, latents.device).view(-1, 1, 1)
                means = torch.where(rows, teacher.mean, means)
        return means

    @override
    def first_deviation(self, step: Step, policy: Policy) -> torch.Tensor:
        """0: the loss compares with no old value."""
        return torch.zeros_like(step.advantages)
