"""One self-contained page about a run: ``python -m paco_grpo.report RUN_DIR``."""
