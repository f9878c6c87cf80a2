"""Compiled transformer blocks (diffusers' regional compilation); the numbers are equal up to rounding."""

import torch

from paco_grpo.policies.base import Policy

# Compiled variants of one block: adapter (current, old, off, merged) x gradient or not x batch of one or more x mask or
# not. Beyond dynamo's default of 8, variants would run uncompiled with a warning that is easily missed.
_MAX_VARIANTS = 64


def compile_blocks(policy: Policy, backend: str = "inductor") -> None:
    """``torch.compile`` each repeated block of the transformer in place.

    Blocks of one class share their code. Sizes are symbolic from the start: a new size or batch does not compile again
    (except a batch of one), and a resumed run uses the same kernels. Names of weights do not change.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    policy.transformer.compile_repeated_blocks(dynamic=True, backend=backend)
