"""Two trainers never share a run folder."""

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
    lock.release()


def test_a_second_trainer_is_refused_until_the_first_is_gone(held, tiny_flux_dir, tmp_path, capsys):
    train = load_script("train").main
    overrides = overrides_for(tiny_flux_dir, tmp_path, resume_from="latest", num_epochs=1)
    command = ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *as_arguments(overrides)]
    assert train(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "in use by another trainer" in error and "--config.run_name" in error
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
    held.release()
    assert train(command) == 0
    lock_folder(
        tmp_path / "runs" / "run"
    ).release()  # the run has ended in this process, and with it the lock


@pytest.mark.slow
def test_all_processes_of_the_second_trainer_end(held, tiny_flux_dir, tmp_path):
    assert run(tiny_flux_dir, tmp_path, 2) == [REFUSED] * 2


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        lock_folder(tmp_path)
    assert (tmp_path / "target").read_text() == "mine"
