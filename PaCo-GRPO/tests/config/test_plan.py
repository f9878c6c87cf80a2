"""m is raised so that everything divides evenly; never an empty batch."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from named import load

from paco_grpo.training.state import describe_evaluations, make_plan

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


def test_what_follows_is_derived_after_overrides():
    assert make_plan(load("t2is"), 1, gradient_steps=1).gradient_steps == 1
    assert (
        make_plan(
            load("t2is", ("train.gradient_step_per_epoch", "3")), 1, gradient_steps=1
        ).gradient_steps
        == 3
    )
    plan = make_plan(
        load("t2is", ("sample.batch_size", "4"), ("train.batch_size", "2")), 8, gradient_steps=2
    )
    assert (plan.prompts, plan.samples, plan.samples_per_process) == (42, 672, 84)
    assert plan.rollout_batches == 21
    assert plan.notes == ()


def test_a_run_says_what_its_evaluations_take():
    """256 images of 20 steps at 512 px against 10 epochs of 672 images of 8 steps at 384 px."""
    options = load("kontext_editing")
    plan = make_plan(options, 7, gradient_steps=2)
    steps = 256 * 20 / (256 * 20 + 10 * 672 * 8)
    pixels = 256 * 20 * 512**2 / (256 * 20 * 512**2 + 10 * 672 * 8 * 384**2)
    line = describe_evaluations(options, plan, 4600)
    assert line.startswith("an evaluation: 256 images of 20 steps at 512 px, before")
    assert f"every 10 epochs: {steps:.0%} of" in line and f"{pixels:.0%} counted by pixels" in line
    everything = load("kontext_editing", ("test.num_images", "None"), ("eval_freq", "0"))
    assert "4600 images" in describe_evaluations(everything, plan, 4600)
    assert "only at the end" in describe_evaluations(everything, plan, 4600)
