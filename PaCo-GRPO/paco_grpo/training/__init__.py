"""The training loop: build a run, then sample, score and update, epoch after epoch."""
