"""Two trainers never share a run folder."""

import errno
import os

import pytest
from forked_runs import REFUSED, run
from tiny_run import ROOT, as_arguments, load_script, overrides_for

from paco_grpo.checkpoint.files import lock_folder
from paco_grpo.options import ConfigError


@pytest.fixture
def held(tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    lock = lock_folder(tmp_path / "runs" / "run")
    yield lock
    lock.close()


def test_a_second_trainer_is_refused_until_the_first_is_gone(held, tiny_flux_dir, tmp_path, capsys):
    train = load_script("train").main
    overrides = overrides_for(tiny_flux_dir, tmp_path, resume_from="latest", num_epochs=1)
    command = ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *as_arguments(overrides)]
    assert train(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "in use by another trainer" in error and "--config.run_name" in error
    assert f"process {os.getpid()} on " in error and ", started 20" in error
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
    held.close()
    assert train(command) == 0
    # The run has ended in this process, and with it the lock.
    lock_folder(tmp_path / "runs" / "run").close()


@pytest.mark.slow
def test_all_processes_of_the_second_trainer_end(held, tiny_flux_dir, tmp_path):
    assert run(tiny_flux_dir, tmp_path, 2) == [REFUSED] * 2


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        lock_folder(tmp_path)
    assert (tmp_path / "target").read_text() == "mine"


def test_a_lock_that_is_a_folder_is_one_sentence(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"\.lock cannot be opened \(Is a directory\); remove it"):
        lock_folder(tmp_path)


def test_who_tries_does_not_erase_who_has_it(tmp_path):
    lock = lock_folder(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            lock_folder(tmp_path)
    lock.close()
    lock_folder(tmp_path).close()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    lock_folder(tmp_path).close()
    assert "without locks" in caplog.text
