"""PaCo-Reward: a pairwise consistency judge on LLaMA-Factory (arXiv 2512.04784)."""
