"""PaCo-GRPO: online RL of flow-matching image generators for consistency across images."""
