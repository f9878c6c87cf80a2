"""Direct Group Preference Optimization (arXiv 2510.08425): the good images of a group against the bad ones.

| paper                  | here                                                     |
|------------------------|----------------------------------------------------------|
| G⁺, G⁻ with weights    | sign and size of the advantages, ΣA = 0 in a group       |
| β                      | train.dgpo_beta                                          |
| reference of the group | train.dgpo_reference: the base model or adapter ``slow`` |
| ratio, ε               | exp(e_slow − e), train.dgpo_clip_range                   |
| KL weight              | train.beta                                               |

The loss of a group, (1/β)·softplus(s) with s = (β/K)·Σ A_i·(e_i − e_i(ref)), has the gradient mean of sigmoid(s)·A_i·∇e_i.
So a first pass without gradient computes sigmoid(s)·A_i, and the second one trains sample by sample.
"""

from collections.abc import Iterator

import numpy as np
import torch

from paco_grpo.objectives.awm import slow_decay
from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square, objective, with_kl
from paco_grpo.objectives.forward import Noised, check_forward_steps, forward_steps
from paco_grpo.options.schema import RunOptions, TrainOptions
from paco_grpo.policies.base import Policy

_SIGMAS = 4  # default: σ an epoch


def error_change(step: Step, policy: Policy, train: TrainOptions) -> torch.Tensor:
    """e − e(ref) (B,), with one noise for all samples of a group."""
    noised = Noised(step, policy, shared=True)
    reference = noised.velocity("slow") if train.dgpo_reference == "slow" else noised.reference
    return noised.error(noised.velocity()) - noised.error(reference)


def group_weights(
    changes: np.ndarray, item_ids: np.ndarray, advantages: np.ndarray, train: TrainOptions
) -> np.ndarray:
    """sigmoid(s)·A_i (n, steps), A centered again, since clipping and left-out samples shift it."""
    weights = np.zeros_like(changes)
    clipped = advantages.clip(-train.adv_clip_max, train.adv_clip_max)
    for item in np.unique(item_ids):
        group = item_ids == item
        centered = (clipped[group] - clipped[group].mean())[:, None]
        total = train.dgpo_beta * (centered * changes[group]).mean(axis=0)
        weights[group] = centered / 2 * (1 + np.tanh(total / 2))  # sigmoid, without overflow
    return weights


def _keeps_slow(train: TrainOptions) -> bool:
    return train.dgpo_clip_range is not None or train.dgpo_reference == "slow"


def _check(options: RunOptions) -> Iterator[str]:
    yield from check_forward_steps(options, _SIGMAS)
    if not options.use_lora:
        yield "use_lora=False cannot be used with train.loss_type='dgpo': its reference is the model without its adapter"
    if not options.per_prompt_stat_tracking or options.sample.num_images_per_prompt < 2:
        yield (
            "train.loss_type='dgpo' compares images of one prompt: it needs per_prompt_stat_tracking=True and at least 2 "
            "sample.num_images_per_prompt"
        )


@objective(
    needs_noise_steps=False,
    steps=forward_steps(default=_SIGMAS),
    snapshots=(
        Snapshot("slow", slow_decay, samples_from=200, every_step=True, needed=_keeps_slow),
    ),
    gradient_steps=1,
    check=_check,
    first_pass=error_change,
    group_weights=group_weights,
)
def dgpo(step: Step, policy: Policy, train: TrainOptions) -> LossOutput:
    """sigmoid(s)·A·e + β·mean((v − v_ref)²); e without gradient where the ratio is already beyond ε in A's direction.

    Metrics: policy_loss, matching_error and, with a clip range, masked_share and slow_distance; with a KL weight, kl.
    """
    noised = Noised(step, policy, shared=True)
    velocity = noised.velocity()
    error, weight = noised.error(velocity), step.group_weights
    metrics = {"matching_error": error}
    trained = error
    if train.dgpo_clip_range is not None:
        slow = noised.velocity("slow")
        ratio = (noised.error(slow) - error.detach()).exp()
        beyond = torch.where(
            weight > 0, ratio > 1 + train.dgpo_clip_range, ratio < 1 - train.dgpo_clip_range
        )
        trained = torch.where(beyond, error.detach(), error)
        metrics |= {"masked_share": beyond.float(), "slow_distance": mean_square(velocity - slow)}
    loss = weight * trained
    metrics["policy_loss"] = loss
    return with_kl(loss, metrics, train.beta, lambda: mean_square(velocity - noised.reference))
