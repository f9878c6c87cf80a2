"""PaCo-GRPO: online RL of flow-matching image generators for consistency across images."""

import paco_grpo.moved  # noqa: F401 - old import paths name the new ones
