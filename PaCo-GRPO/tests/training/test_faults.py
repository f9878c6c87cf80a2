"""Runs that are killed, stopped, or out of disk: a resumed run ends with the same bits."""

import signal

import pytest
from forked_runs import (
    STOPPED,
    Fault,
    checkpoints,
    fill_disk,
    lose_log_probs,
    message,
    rows,
    run,
    run_to_end,
    state,
    terminate,
)

IMAGES = 16  # an epoch; in batches of 4: 4 batches on one process, 2 on each of two


@pytest.mark.long
def test_killed_in_the_second_epoch_and_resumed_is_bit_identical(tiny_flux_dir, tmp_path):
    whole = tmp_path / "whole"
    run_to_end(tiny_flux_dir, whole, 2)
    killed = run(tiny_flux_dir, tmp_path, 2, Fault("commit", 2))
    # Where one is killed, the other may end by itself, without a partner, before the launcher
    # kills it.
    assert -signal.SIGKILL in killed and 0 not in killed
    assert [name for name in checkpoints(tmp_path) if not name.startswith(".")] == ["epoch_0001"]
    run_to_end(tiny_flux_dir, tmp_path, 2, resume_from="latest")
    assert state(tmp_path, 3) == state(whole, 3)
    assert rows(tmp_path) == rows(whole)
    assert checkpoints(tmp_path) == ["epoch_0001", "epoch_0002", "epoch_0003"]


@pytest.mark.slow
def test_two_processes_stop_between_batches_when_one_gets_a_signal(tiny_flux_dir, tmp_path):
    fault = Fault("decode", 3, terminate, rank=1)
    assert run(tiny_flux_dir, tmp_path, 2, fault, save_freq=0) == [STOPPED] * 2
    assert "resume_from=latest" in message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0001"]


@pytest.mark.slow
def test_non_finite_loss_on_one_process_stops_both_before_the_update(tiny_flux_dir, tmp_path):
    fault = Fault("backward", 2, lose_log_probs, rank=1)
    assert (
        run(tiny_flux_dir, tmp_path, 2, fault, num_epochs=1, train__batch_size=4) == [STOPPED] * 2
    )
    for rank in range(2):
        assert "optimizer step 2" in message(tmp_path, rank)
    assert checkpoints(tmp_path) == ["stopped_epoch_0001"]


@pytest.mark.slow
def test_a_full_disk_of_the_main_process_ends_both(tiny_flux_dir, tmp_path):
    fault = Fault("commit", 1, fill_disk)
    assert run(tiny_flux_dir, tmp_path, 2, fault, num_epochs=1) == [1] * 2
    for rank in range(2):
        assert "could not be written" in (tmp_path / f"stderr_{rank}").read_text()
