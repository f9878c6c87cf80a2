"""m is raised so that everything divides evenly; never an empty batch."""

from hypothesis import given
from hypothesis import strategies as st
from named import override

from paco_grpo.training.plan import gradient_steps, make_plan

CONFIG = override()
SMALL = st.integers(1, 40)


@given(m=SMALL, k=SMALL, batch=SMALL, processes=st.integers(1, 16))
def test_everything_divides_evenly(m, k, batch, processes):
    config = CONFIG.copy_and_resolve_references()
    config.sample.update({"unique_sample_num_per_epoch": m, "num_images_per_prompt": k, "batch_size": batch})
    plan = make_plan(config, processes)
    assert plan.prompts >= m
    assert plan.samples == plan.prompts * k == plan.samples_per_process * processes
    assert 1 <= plan.sample_batch_size <= batch
    assert plan.samples_per_process == plan.rollout_batches * plan.sample_batch_size
    assert plan.rollout_batches >= 1
    unit = processes * plan.sample_batch_size
    assert all(fewer * k % unit for fewer in range(m, plan.prompts)), "raised further than needed"
    assert (plan.prompts != m) == any("raised" in note for note in plan.notes)


def test_more_processes_do_not_change_the_toy_epoch():
    assert make_plan(CONFIG, 1).samples == make_plan(CONFIG, 2).samples == make_plan(CONFIG, 4).samples


def test_what_follows_is_derived_after_overrides():
    config = override(("train.loss_type", "nft"), name="t2is")
    assert gradient_steps(config) == 1
    config = override(("sample.batch_size", "4"), ("train.batch_size", "2"), name="t2is")
    plan = make_plan(config, 8)
    assert (plan.prompts, plan.samples, plan.samples_per_process) == (42, 672, 84)
    assert (plan.rollout_batches, plan.samples_per_step, plan.accumulation) == (21, 336, 21)
    assert plan.notes == ()
