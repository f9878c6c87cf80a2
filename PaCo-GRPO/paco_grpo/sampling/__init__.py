"""From noise to latents: schedules, one stochastic step and its log-probability, and the rollout."""
