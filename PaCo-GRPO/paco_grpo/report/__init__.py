"""A run directory becomes one self-contained page: ``python -m paco_grpo.report RUN_DIR``."""
