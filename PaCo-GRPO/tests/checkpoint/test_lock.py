"""Two trainers never share a run folder."""

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys

import pytest
from forked_runs import REFUSED, message, run
from tiny_run import ROOT, load_script, overrides_for, tiny_options

from paco_grpo.checkpoint.lock import RunLock, claim_folder
from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run

HOLD = "import sys; from pathlib import Path; from paco_grpo.checkpoint.lock import RunLock; lock = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def trainer(tmp_path):
    """Another process that holds the run folder."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def command(flux, folder, **changes):
    overrides = overrides_for(flux, folder, **changes)
    return ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *(f"--config.{key}={value}" for key, value in overrides.items())]


def test_a_second_trainer_is_refused_until_the_first_is_gone(trainer, tiny_flux_dir, tmp_path, capsys):
    train = load_script("train").main
    assert train(command(tiny_flux_dir, tmp_path, resume_from="latest")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"process {trainer.pid} on {socket.gethostname()}" in error and "--config.run_name" in error
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert train(command(tiny_flux_dir, tmp_path, resume_from="latest", num_epochs=1)) == 0
    RunLock(tmp_path / "runs" / "run").release()  # the run has ended in this process, and with it the lock


def test_all_processes_of_the_second_trainer_end(trainer, tiny_flux_dir, tmp_path):
    assert run(tiny_flux_dir, tmp_path, 2) == [REFUSED] * 2
    assert all(f"process {trainer.pid} on" in message(tmp_path, rank) for rank in (0, 1))


def test_a_run_that_fails_lets_go(tiny_flux_dir, tmp_path):
    options = tiny_options(tiny_flux_dir, tmp_path)
    (tmp_path / "prompts" / "test_metadata.jsonl").write_text("{}\n")
    for _ in range(2):
        with pytest.raises(Exception, match="prompt"):
            build_run(options)


def test_default_names_are_unique(tiny_flux_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    options = tiny_options(tiny_flux_dir, tmp_path, run_name="")
    names = [build_run(options, "t2is").options.run_name for _ in range(3)]
    assert names == ["t2is-20260101-000000", "t2is-20260101-000000-2", "t2is-20260101-000000-3"]


def test_a_claimed_folder_is_new(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").write_text("a file")
    assert claim_folder(tmp_path, "a") == "a-3" and claim_folder(tmp_path / "deeper", "a") == "a"


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    lock.release()
    with RunLock(tmp_path):
        pass
    os.close(end)
    os.waitpid(child, 0)


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path):
        assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text
