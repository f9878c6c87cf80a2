"""What happens to one of two processes ends both."""

import pytest
from forked_runs import (
    STOPPED,
    checkpoints,
    message,
    run,
)


@pytest.mark.slow
def test_two_processes_stop_between_batches_when_one_gets_a_signal(tiny_flux_dir, tmp_path):
    assert run(tiny_flux_dir, tmp_path, 2, "signal", save_freq=0) == [STOPPED] * 2
    assert "resume_from=latest" in message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0001"]


@pytest.mark.slow
def test_non_finite_loss_on_one_process_stops_both_before_the_update(tiny_flux_dir, tmp_path):
    changes = {"num_epochs": 1, "train__batch_size": 4}
    assert run(tiny_flux_dir, tmp_path, 2, "not finite", **changes) == [STOPPED] * 2
    for rank in range(2):
        assert "optimizer step 2" in message(tmp_path, rank)
    assert checkpoints(tmp_path) == ["stopped_epoch_0001"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("old log-probability", {"mixed_precision": "bf16"}),
        ("group weights", {"train__loss_type": "dgpo", "train__num_sigmas": 1}),
    ],
)
def test_an_error_before_the_update_of_one_process_ends_both(
    tiny_flux_dir, tmp_path, fault, changes
):
    """Where processes compare what they have computed, the other one waits."""
    assert run(tiny_flux_dir, tmp_path, 2, fault, save_freq=0, **changes) == [STOPPED] * 2
    assert "GPU 1 is full): lower config" in message(tmp_path, rank=0)
    assert message(tmp_path, rank=0) == message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0000"]


@pytest.mark.slow
def test_a_bad_image_of_one_process_ends_both_before_a_forward(tiny_flux_dir, tmp_path):
    """Also where a forward is a collective operation."""
    changes = {"train__sharding": "fsdp2", "save_freq": 0}
    assert run(tiny_flux_dir, tmp_path, 2, "bad image", **changes) == [STOPPED] * 2
    assert "row 7" in message(tmp_path, rank=0) == message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0001"]
