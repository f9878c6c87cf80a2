"""Centered Reward Distillation (arXiv 2603.14128): implicit rewards match external ones in a group.

| paper                  | here                                                    |
|------------------------|---------------------------------------------------------|
| r                      | preference (B,) in [0, 1], from the advantage           |
| v_θ, v_old             | velocity, old velocity (adapter ``old``)                 |
| log π_θ/π_old          | R (B,) = e(old)/m(old) − e/m, e = mean((v − u)²)         |
| adaptive weight        | m (B,) = stopgrad(mean|v − u|), at least 1e-5           |
| β                      | train.crd_beta                                          |
| sampling model         | adapter ``sampling``                                     |
| KL weight              | train.beta                                              |

R and r are centered over their group, where the unknown normalizer of the prompt cancels. The mean
of R needs no gradient: the residuals of a group add up to 0. So ``per_group`` computes the means,
and ``loss`` trains image by image.
"""

from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.objectives.base import Group, LossOutput, Snapshot, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective, check_groups
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy


class Crd(NoisedObjective):
    """adv_clip_max/β·(β·(R − mean R) − (r − mean r))² + KL weight·mean((v − v_ref)²) at one σ.

    Metrics: policy_loss, implicit_reward (R) and, with a KL weight, kl.
    """

    gradient_steps = 2
    default_sigmas = 4
    whole_groups = True

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.snapshots = (
            Snapshot("old", old_decay),
            Snapshot("sampling", sampling_decay, samples_from=0),
        )

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        yield from check_groups(options)

    @override
    def measure(self, step: Step, policy: Policy) -> dict[str, torch.Tensor]:
        noised = Noised(step, policy)
        implicit = self.implicit_reward(noised, noised.velocity())
        return {"implicit": implicit, "preference": self.preference(step)}

    @override
    def per_group(self, group: Group) -> dict[str, np.ndarray]:
        """The means of R and r, which are the same for all images of the group."""
        return {name: values.mean(axis=0)[None] for name, values in group.measured.items()}

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        noised = Noised(step, policy)
        velocity = noised.velocity()
        implicit = self.implicit_reward(noised, velocity)
        target = self.preference(step) - step.group["preference"]
        residual = train.crd_beta * (implicit - step.group["implicit"]) - target
        loss = train.adv_clip_max / train.crd_beta * residual.square()
        metrics = {"policy_loss": loss, "implicit_reward": implicit}
        if train.beta != 0:
            metrics["kl"] = mean_square(velocity - noised.reference)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)

    def implicit_reward(self, noised: Noised, velocity: torch.Tensor) -> torch.Tensor:
        """R (B,)."""
        old_error = _normalized_error(noised, noised.velocity("old"))
        return old_error - _normalized_error(noised, velocity)

    def preference(self, step: Step) -> torch.Tensor:
        """r (B,)."""
        return (step.advantages / self.train.adv_clip_max / 2 + 0.5).clamp(0, 1)


def old_decay(step: int) -> float:
    """Decay of the old policy after ``step`` optimizer steps, as in the paper's text rendering."""
    return min(0.25 + 0.005 * step, 0.999)


def sampling_decay(step: int) -> float:
    """Decay of the policy that samples: it follows at once for 75 optimizer steps."""
    return min(max(step - 75, 0) * 0.0075, 0.999)


def _normalized_error(noised: Noised, velocity: torch.Tensor) -> torch.Tensor:
    """e/m (B,)."""
    difference = velocity - noised.target
    normalizer = difference.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(difference) / normalizer
