"""PaCo-GRPO: online RL of flow-matching image generators (arXiv 2512.04784, after Flow-GRPO, arXiv 2505.05470)."""
