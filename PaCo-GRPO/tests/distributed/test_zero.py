"""DeepSpeed ZeRO-1 and 2 against one process, where DeepSpeed is installed (a CPU will do)."""

import functools

import pytest
from forked_runs import (
    COMPARABLE,
    STOPPED,
    Fault,
    assert_same_training,
    assert_same_weights,
    lose_log_probs,
    message,
    observed,
    run,
    run_to_end,
    state,
)

pytest.importorskip("deepspeed", reason="DeepSpeed not installed")
pytestmark = pytest.mark.long


def train(flux, folder, stage, **changes):
    """Of one process without a stage, of two with one."""
    run_to_end(flux, folder, 2 if stage else 1, zero=stage, **COMPARABLE | {"save_freq": 1} | changes)


@pytest.fixture(scope="module")
def trained(tiny_flux_dir, tmp_path_factory):
    """Folder of a finished run."""

    @functools.cache
    def of(stage: int | None, loss_type: str = "ppo", num_epochs: int = 2):
        folder = tmp_path_factory.mktemp("run")
        train(tiny_flux_dir, folder, stage, train__loss_type=loss_type, num_epochs=num_epochs)
        return folder

    return of


@pytest.mark.parametrize(("stage", "loss_type"), [(1, "ppo"), (2, "ppo"), (2, "nft")])
def test_a_sharded_optimizer_changes_nothing(trained, stage, loss_type):
    one, two = trained(None, loss_type), trained(stage, loss_type)
    assert observed(two)["strategy"] == f"deepspeed-zero{stage}"
    assert_same_training(one, two)
    assert observed(two)["optimizer_here"] < 0.55 * observed(one)["optimizer_here"]


def test_resume_is_bit_identical(trained, tiny_flux_dir):
    whole, half = trained(2), trained(2, num_epochs=1)
    train(tiny_flux_dir, half, 2, resume_from="latest")
    assert state(whole, 2) == state(half, 2)


def test_a_checkpoint_resumes_with_another_strategy(trained, tiny_flux_dir):
    whole, half = trained(None), trained(1, num_epochs=1)
    train(tiny_flux_dir, half, None, resume_from="latest")
    assert_same_weights(whole, half)


def test_non_finite_loss_on_one_process_stops_both_before_the_update(tiny_flux_dir, tmp_path):
    fault = Fault("backward", 3, lose_log_probs, rank=1)  # in the second step
    status = run(tiny_flux_dir, tmp_path, 2, fault, zero=2)
    assert status == [STOPPED, STOPPED]
    assert "the loss is nan" in message(tmp_path, 1) and "another process" in message(tmp_path, 0)
