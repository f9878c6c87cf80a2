"""Rewards: one reward, one file; ``registry`` finds them by name or import path."""
