"""Runs that are killed, stopped, or out of disk: a resumed run ends with the same bits."""

import signal
from pathlib import Path

import pytest
from forked_runs import (
    STOPPED,
    Fault,
    checkpoints,
    images_scored,
    lose_log_probs,
    message,
    rows,
    run,
    run_to_end,
    state,
    terminate,
)

IMAGES = 16  # an epoch; in batches of 4: 4 batches on one process, 2 on each of two


@pytest.fixture(scope="module")
def uninterrupted(tiny_flux_dir, tmp_path_factory):
    """Number of processes → folder of a run without faults."""
    folders = {}

    def of(processes):
        if processes not in folders:
            folders[processes] = tmp_path_factory.mktemp("uninterrupted")
            run_to_end(tiny_flux_dir, folders[processes], processes)
        return folders[processes]

    return of


def kill_in(phase: str, processes: int) -> Fault:
    """In the second epoch, in the middle of a phase."""
    batches = IMAGES // 4 // processes
    return {
        "sampling": Fault("decode", batches + 2),
        "reward": Fault("score", batches + 1, after=True),
        "training": Fault("update", 4),
        "saving": Fault("write", 4),
        "committing": Fault("commit", 2),
    }[phase]


def assert_resumes(flux: Path, folder: Path, expected: Path, processes: int = 1) -> None:
    run_to_end(flux, folder, processes, resume_from="latest")
    assert state(folder, 3) == state(expected, 3)
    assert rows(folder) == rows(expected)


@pytest.mark.parametrize(
    ("phase", "processes"),
    [
        pytest.param("reward", 1, marks=pytest.mark.slow),
        pytest.param("saving", 1, marks=pytest.mark.long),
        *(
            pytest.param(phase, 2, marks=pytest.mark.long)
            for phase in ("sampling", "training", "committing")
        ),
    ],
)
def test_killed_and_resumed_is_bit_identical(
    uninterrupted, tiny_flux_dir, tmp_path, phase, processes
):
    killed = run(tiny_flux_dir, tmp_path, processes, kill_in(phase, processes))
    # Where one is killed, the other may end by itself, without a partner, before the launcher
    # kills it.
    assert -signal.SIGKILL in killed and 0 not in killed
    assert [name for name in checkpoints(tmp_path) if not name.startswith(".")] == ["epoch_0001"]
    assert_resumes(tiny_flux_dir, tmp_path, uninterrupted(processes), processes)
    assert checkpoints(tmp_path) == ["epoch_0001", "epoch_0002", "epoch_0003"]


@pytest.mark.slow
def test_two_processes_stop_between_batches_when_one_gets_a_signal(
    uninterrupted, tiny_flux_dir, tmp_path
):
    fault = Fault("decode", 3, terminate, rank=1)
    assert run(tiny_flux_dir, tmp_path, 2, fault, save_freq=0) == [STOPPED] * 2
    assert "--config.run_name=run --config.resume_from=latest" in message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0001"]
    assert (
        images_scored(tmp_path) < 2 * IMAGES
    )  # not rank 1's last batch; rank 0 may have been ahead of it
    assert_resumes(tiny_flux_dir, tmp_path, uninterrupted(2), 2)


@pytest.mark.slow
def test_non_finite_loss_on_one_process_stops_both_before_the_update(tiny_flux_dir, tmp_path):
    fault = Fault("backward", 2, lose_log_probs, rank=1)
    assert (
        run(tiny_flux_dir, tmp_path, 2, fault, num_epochs=1, train__batch_size=4) == [STOPPED] * 2
    )
    assert "the gradient is not finite, in epoch 1 before optimizer step 2" in message(
        tmp_path, rank=0
    )
    assert "the loss is nan, in epoch 1 before optimizer step 2" in message(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["stopped_epoch_0001"]
