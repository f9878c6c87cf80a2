"""Tests of this folder run on the CPU or on the GPU that tests/pretend_cuda.py pretends."""

import contextlib

import pytest
from accelerate.state import AcceleratorState
from pretend_cuda import pretended_gpu


@pytest.fixture
def on():
    """``with on("cpu")`` or ``on("cuda")``: accelerate looks for devices again."""

    @contextlib.contextmanager
    def machine(device: str):
        AcceleratorState._reset_state(reset_partial_state=True)
        with pretended_gpu() if device == "cuda" else contextlib.nullcontext():
            yield
        AcceleratorState._reset_state(reset_partial_state=True)

    yield machine
    AcceleratorState._reset_state(reset_partial_state=True)
