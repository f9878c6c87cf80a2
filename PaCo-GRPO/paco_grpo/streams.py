"""The random streams of a run."""

from enum import IntEnum


class Stream(IntEnum):
    """First word of what seeds a random stream, before ``config.seed``, the epoch and others.

    Streams that agree in these are therefore unrelated. Without such a word, (seed, epoch) seeds
    the choice of noise steps, and (seed of the sample, step) the noise of a step.
    """

    PROMPTS = 11  # which prompts an epoch has
    SAMPLE_ORDER = 12  # order of an epoch's samples over all processes
    SAMPLE_SEEDS = 13  # seed of each sample's noise
    INITIAL_SEEDS = 14  # seeds of initial noise that samples share
    PASS_ORDER = 15  # order of the samples in the second and further passes over an epoch
    TRAINED_STEPS = 16  # which steps of the schedule are trained
    SHARED_NOISE = 17  # training noise that samples share
    GLOBAL = 18  # the generators of Python, NumPy and torch
    EVALUATION = 21  # initial noise of the test images; its seed is config.test.seed
    PROBE = 31  # initial noise of the health probe's images
