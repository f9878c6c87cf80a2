"""Runs that are killed, stopped, or out of disk: what is on disk is whole, and going on gives the same bits."""

import signal
from pathlib import Path

import pytest
from survival import FAILED, STOPPED, Harm, checkpoints, images_scored, rows, run, said, state

IMAGES = 16  # an epoch; in batches of 4: 4 batches on one process, 2 on each of two
KILLED = [-signal.SIGKILL]


@pytest.fixture(scope="module")
def whole(tiny_flux_dir, tmp_path_factory):
    """Processes → folder of an undisturbed run."""
    folders = {}

    def of(processes):
        if processes not in folders:
            folders[processes] = tmp_path_factory.mktemp(f"whole{processes}")
            assert run(tiny_flux_dir, folders[processes], processes) == [0] * processes
        return folders[processes]

    return of


def moments(processes: int) -> dict[str, Harm]:
    """In the second epoch, when half of each thing is done."""
    batches = IMAGES // 4 // processes
    return {
        "sampling": Harm("decode", batches + 2),
        "reward": Harm("score", batches + 1, after=True),
        "training": Harm("update", 4),
        "saving": Harm("write", 7),
        "committing": Harm("commit", 2),
    }


def assert_same_end(one: Path, two: Path) -> None:
    assert state(one, 3) == state(two, 3)
    assert rows(one) == rows(two)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("moment", ["sampling", "reward", "training", "saving", "committing"])
def test_killed_and_resumed_is_bit_identical(whole, tiny_flux_dir, tmp_path, moment, processes):
    killed = run(tiny_flux_dir, tmp_path, processes, moments(processes)[moment])
    assert killed == KILLED * processes
    assert [name for name in checkpoints(tmp_path) if not name.startswith(".")] == ["epoch_0001"]
    assert run(tiny_flux_dir, tmp_path, processes, resume_from="latest") == [0] * processes
    assert_same_end(tmp_path, whole(processes))
    assert checkpoints(tmp_path) == ["epoch_0001", "epoch_0002", "epoch_0003"]
    # Only what was on its way when the kill came is asked for again: at most a batch a process.
    again = images_scored(tmp_path) - images_scored(whole(processes))
    assert 0 <= again <= 4 * processes
    if moment in ("training", "saving", "committing"):
        assert again == 0


@pytest.mark.slow
def test_killed_while_scores_come_in(whole, tiny_flux_dir, tmp_path):
    assert run(tiny_flux_dir, tmp_path, 1, moments(1)["reward"]) == KILLED
    assert images_scored(tmp_path) == IMAGES + 4
    assert run(tiny_flux_dir, tmp_path, 1, resume_from="latest") == [0]
    assert_same_end(tmp_path, whole(1))
    assert images_scored(tmp_path) == images_scored(whole(1))


@pytest.mark.slow
def test_two_processes_stop_between_batches_when_one_is_asked_to(whole, tiny_flux_dir, tmp_path):
    harm = Harm("decode", 3, action="terminate", rank=1)
    assert run(tiny_flux_dir, tmp_path, 2, harm, save_freq=0) == [STOPPED] * 2
    how = "by a signal. To resume: the same command with --config.run_name=run --config.resume_from=latest"
    assert how in said(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["epoch_0001"]
    assert images_scored(tmp_path) <= IMAGES + 8  # the second epoch's first batches, not its last
    assert run(tiny_flux_dir, tmp_path, 2, resume_from="latest") == [0, 0]
    assert_same_end(tmp_path, whole(2))


@pytest.mark.slow
def test_full_disk_leaves_the_old_checkpoint(whole, tiny_flux_dir, tmp_path):
    """The system refuses writes beyond a size, in the middle of the second checkpoint."""
    assert run(tiny_flux_dir, tmp_path, 1, Harm("begin", 2, action="fill_disk", after=True)) == [FAILED]
    assert "epoch_0002 could not be written" in said(tmp_path) and "epoch_0001 is intact" in said(tmp_path)
    assert "Free some space" in said(tmp_path)
    assert checkpoints(tmp_path) == ["epoch_0001"]
    assert run(tiny_flux_dir, tmp_path, 1, resume_from="latest") == [0]
    assert_same_end(tmp_path, whole(1))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_stops_both_before_the_update(tiny_flux_dir, tmp_path):
    harm = Harm("backward", 2, action="spoil", rank=1)
    assert run(tiny_flux_dir, tmp_path, 2, harm, num_epochs=1, train__batch_size=4) == [STOPPED] * 2
    assert "the loss is not finite on another process, in epoch 1 before optimizer step 2" in said(tmp_path, rank=0)
    assert "the loss is nan in the batch of samples [" in said(tmp_path, rank=1)
    assert checkpoints(tmp_path) == ["stopped_epoch_0001"]
