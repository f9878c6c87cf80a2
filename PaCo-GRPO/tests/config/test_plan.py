"""m is raised so that everything divides evenly; a note names an average that lags far behind."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from named import load

from paco_grpo.training.state import make_plan

OPTIONS = load()
SMALL = st.integers(1, 40)


@given(m=SMALL, k=SMALL, batch=SMALL, processes=st.integers(1, 16))
def test_everything_divides_evenly(m, k, batch, processes):
    sample = {"unique_sample_num_per_epoch": m, "num_images_per_prompt": k, "batch_size": batch}
    plan = make_plan(
        dataclasses.replace(OPTIONS, sample=dataclasses.replace(OPTIONS.sample, **sample)),
        processes,
        2,
    )
    assert plan.prompts >= m
    assert plan.samples == plan.prompts * k == plan.samples_per_process * processes
    assert 1 <= plan.sample_batch_size <= batch
    assert plan.samples_per_process == plan.rollout_batches * plan.sample_batch_size
    assert plan.rollout_batches >= 1
    unit = processes * plan.sample_batch_size
    assert all(fewer * k % unit for fewer in range(m, plan.prompts)), "raised further than needed"
    assert (plan.prompts != m) == any("raised" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("steps", "inner_epochs", "interval", "decay", "epochs", "expected"),
    [
        # It moves first at step 8, half of the way: (1+8)/(10+8). Epoch 15 is the last before 16.
        (1, 1, 8, 0.9, 40, ("epoch 15,", "11.0 epochs")),
        # At steps 30 and 60, three quarters of the way: to 22.5, then to 50.6 of six an epoch.
        (2, 3, 30, 0.25, 40, ("epoch 14,", "5.6 epochs")),
        (1, 1, 8, 0.9, 2, None),
    ],
)
def test_an_average_that_lags_far_behind_is_said(
    steps, inner_epochs, interval, decay, epochs, expected
):
    overrides = {
        "train.gradient_step_per_epoch": str(steps),
        "train.num_inner_epochs": str(inner_epochs),
        "train.ema_update_interval": str(interval),
        "train.ema_decay": str(decay),
        "num_epochs": str(epochs),
    }
    notes = make_plan(load("t2is", *overrides.items()), 7, 5).notes
    assert len(notes) == (expected is not None)
    assert all(words in notes[0] for words in expected or ())
    assert not make_plan(load("t2is", *overrides.items(), ("train.ema", "no")), 7, 5).notes
