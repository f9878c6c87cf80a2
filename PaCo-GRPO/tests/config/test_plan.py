"""m is raised so that everything divides evenly; never an empty batch."""

import dataclasses

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
