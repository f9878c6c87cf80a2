"""GRPO-Guard (arXiv 2510.22319): a ratio normalized per step.

Clipping then acts equally at every noise level.

| paper           | here                                |
|-----------------|-------------------------------------|
| d = sqrt(−dt)·s | trained.std (B,)                 |
| b               | bias (B,) = mean((μ − μ_old)²)/(2d²) |
| ratio           | exp((log p − log p_old + b)·d)      |
"""

from collections.abc import Iterator

from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Objective, Step, mean_square, reference_kl
from paco_grpo.objectives.ppo import clipped_loss, ratio_metrics
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import transition


class GuardGrpo(Objective):
    """Clipped policy loss of the guarded ratio, divided by −dt, + β·KL.

    Everything is per sample (the published code averages b, s and dt over the batch). μ_old is the
    recorded mean. Metrics as in :class:`paco_grpo.objectives.ppo.Ppo`, plus guard_bias.
    """

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        if options.sample.transition == "cps":
            yield (
                "sample.transition='cps' cannot be used with train.loss_type='guard_grpo': "
                "its correction needs a normal density"
            )

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        noise = step.noise
        trained = transition(policy, step.rollout, noise.latents, step.index)
        log_ratio = trained.log_prob(noise.next_latents) - noise.log_prob
        bias = mean_square(trained.mean - noise.mean) / (2 * trained.std.square())
        guarded = (log_ratio + bias) * trained.std
        ratio = guarded.exp()
        loss = clipped_loss(ratio, step.advantages, train.clip_range) / step.minus_dt
        metrics = ratio_metrics(ratio, guarded, train.clip_range)
        metrics["policy_loss"] = loss
        metrics["guard_bias"] = bias
        if train.beta != 0:
            metrics["kl"] = reference_kl(step, policy, trained)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)
