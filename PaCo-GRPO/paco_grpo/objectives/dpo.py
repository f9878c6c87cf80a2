"""Online Diffusion-DPO (arXiv 2311.12908, eq. 14) in a flow's velocities: best against worst.

| paper         | here                                                         |
|---------------|--------------------------------------------------------------|
| x^w, x^l      | the images of a group with the largest and smallest A        |
| ε, t          | one noise and σ for both                                     |
| ‖ε − ε_θ‖²    | e (B,) = mean((v − u)²)                                      |
| βT            | train.dpo_beta                                               |
| reference     | base model, or the start (``train.reference``)               |
| KL weight     | train.beta                                                   |

With z = −(β/2)·((e − e_ref)_w − (e − e_ref)_l), a pair's loss −log sigmoid(z) has the gradient
(β/2)·sigmoid(−z)·(∇e_w − ∇e_l). So ``per_group`` computes sigmoid(−z), and ``loss`` trains image by
image; an image counts half of a pair, hence β in place of β/2.
"""

from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.objectives.base import Group, LossOutput, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective, check_groups
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy


class Dpo(NoisedObjective):
    """±β·sigmoid(−z)·e + KL weight·mean((v − v_ref)²).

    + is for the best image of a group, − for its worst; the others are not trained. Metrics:
    policy_loss (−log sigmoid(z)), accuracy (z > 0), matching_error and, with a KL weight, kl.
    """

    default_sigmas = 1
    whole_groups = True

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        yield from check_groups(options)

    @override
    def keep(self, advantages: np.ndarray, item_ids: np.ndarray) -> np.ndarray:
        """The first best and the first worst image of each group, unless all are equal."""
        mask = np.zeros(len(advantages), bool)
        for item_id in np.unique(item_ids):
            members = np.flatnonzero(item_ids == item_id)
            values = advantages[members]
            if np.ptp(values) > 0:
                mask[members[[values.argmax(), values.argmin()]]] = True
        return mask

    @override
    def measure(self, step: Step, policy: Policy) -> dict[str, torch.Tensor]:
        """e − e_ref, with one noise for both images of a pair."""
        noised = Noised(step, policy, shared=True)
        return {"change": noised.error(noised.velocity()) - noised.error(noised.reference)}

    @override
    def per_group(self, group: Group) -> dict[str, np.ndarray]:
        """±β·sigmoid(−z) of each image, and z of the pair."""
        beta = self.train.dpo_beta
        # 0 where the two clipped advantages are equal: which is better is then unknown.
        sign = np.sign(group.advantages - group.advantages.mean())[:, None]
        margin = -beta / 2 * (sign * group.measured["change"]).sum(axis=0)
        sigmoid = (1 - np.tanh(margin / 2)) / 2  # of −z, without overflow
        return {"weight": sign * beta * sigmoid, "margin": margin[None]}

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        noised = Noised(step, policy, shared=True)
        velocity = noised.velocity()
        error = noised.error(velocity)
        loss = step.group["weight"] * error
        margin = step.group["margin"]
        metrics = {
            "policy_loss": torch.nn.functional.softplus(-margin),
            "accuracy": (margin > 0).float(),
            "matching_error": error,
        }
        if self.train.beta != 0:
            metrics["kl"] = mean_square(velocity - noised.reference)
            loss = loss + self.train.beta * metrics["kl"]
        return LossOutput(loss, metrics)
