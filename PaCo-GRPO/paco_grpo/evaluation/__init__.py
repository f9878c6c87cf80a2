"""Sampling and scoring the test set, during a run and without one."""
