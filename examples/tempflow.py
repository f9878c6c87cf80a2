"""TempFlow-GRPO's weights (arXiv 2508.04324) as an objective of your own.

A step's loss is weighted by its noise, with mean 1 over the steps that may be noisy: early steps
decide more of the image. In PaCo-GRPO:

    PYTHONPATH=../examples bash scripts/single_node/train_flux.sh t2is \\
      --config.train.loss_type=tempflow:TempFlow --config.sample.noise_steps=1,2,3 \\
      --config.sample.num_noise_steps=1 --config.sample.same_latent=True

The last two options are its branching: images of a prompt share all steps before the noisy one.
"""

from paco_grpo.objectives import LossOutput
from paco_grpo.objectives.ppo import Ppo
from paco_grpo.sampling.denoise import find_transition


class TempFlow(Ppo):
    """Flow-GRPO's loss, times the step's standard deviation over the mean one."""

    def loss(self, step, policy):
        loss, metrics = super().loss(step, policy)
        deviations = {i: self.deviation(step, i) for i in self.options.sample.noise_steps}
        mean = sum(deviations.values()) / len(deviations)
        weight = deviations[step.index] / mean
        return LossOutput(weight * loss, {**metrics, "step_weight": weight.expand(len(loss))})

    def deviation(self, step, index):
        """The standard deviation (1,) of the noise at step ``index``, whatever the latents are."""
        rollout = step.rollout
        take_step = find_transition(rollout.transition)
        x = rollout.clean_latents[:1]
        sigma, sigma_next = rollout.sigmas[index : index + 2].to(x.device).view(2, 1)
        first = float(rollout.sigmas[1])
        return take_step(x, x, sigma, sigma_next, first, rollout.noise_level).std
