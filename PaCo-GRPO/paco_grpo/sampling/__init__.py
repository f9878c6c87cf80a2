"""From noise to images: one stochastic step, the rollout, sizes and decoding."""
