"""The training loop and what belongs to a run: configuration, evaluation, checkpoints, EMA,
tracking.
"""
