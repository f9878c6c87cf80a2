"""The run's folder is removed, made read-only or replaced while a run goes on: one line, status 4,
what helps.
"""

import errno
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import as_arguments, load_script, overrides_for, tiny_options

from paco_grpo.atomic import remedy
from paco_grpo.checkpoint import files
from paco_grpo.distributed.launch import StopSignal
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.training.trainer import Trainer

script = load_script("train")


@pytest.fixture
def hurt(tiny_flux_dir, tmp_path, monkeypatch, capsys):
    """Run with an action before the second epoch is sampled; returns status and the last line of
    stderr.
    """

    def run(action, **changes):
        calls = []
        sample = Trainer._sample

        def act_then_sample(trainer, *arguments):
            calls.append(1)
            if len(calls) == 2:
                action(trainer.run.folder)
            return sample(trainer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_sample", act_then_sample)
            status = script.train(tiny_options(tiny_flux_dir, tmp_path, **changes), "toy_t2is")
        return status, capsys.readouterr().err.splitlines()[-1]

    return run


def replace_by_folder(name):
    def action(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return action


def checkpoints_become_a_file(folder):
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (shutil.rmtree, "put it back"),
        (replace_by_folder("metrics.jsonl"), "metrics.jsonl"),
        (checkpoints_become_a_file, "checkpoints"),
    ],
    ids=["removed", "folder for file", "file for folder"],
)
def test_is_one_line_with_status_4(hurt, action, named):
    status, line = hurt(action)
    assert status == 4 and line.startswith("error: ") and named in line
    assert line.count("--config.resume_from=latest") == 1
    assert line.count("intact") <= 1


@pytest.mark.parametrize(
    ("number", "helps"),
    [(errno.EPERM, "writable"), (errno.EROFS, "read-only"), (errno.ENOSPC, "free some space")],
)
def test_a_checkpoint_that_cannot_be_written_says_what_helps(
    hurt, monkeypatch, tmp_path, number, helps
):
    def fail(partial):
        raise OSError(number, "refused", str(partial))

    status, line = hurt(lambda _: monkeypatch.setattr(files, "begin", fail))
    assert status == 4 and helps in line and "earlier ones are intact" in line
    assert ("free some space" in line) == (number == errno.ENOSPC)
    assert line.count("resume") == 1
    assert (tmp_path / "runs/run/checkpoints/epoch_0001").is_dir()


def test_a_defect_elsewhere_keeps_its_traceback(hurt, monkeypatch):
    def fail(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/file")

    with pytest.raises(FileNotFoundError):
        hurt(lambda _: monkeypatch.setattr(FluxPolicy, "decode", fail))


def test_checkpoints_that_were_removed_are_said(hurt, caplog, tmp_path):
    status, _ = hurt(lambda folder: shutil.rmtree(folder / "checkpoints"))
    assert status == 0 and "checkpoints was removed, and earlier checkpoints with it" in caplog.text
    assert (tmp_path / "runs/run/checkpoints/epoch_0002").is_dir()


def test_errors_of_libraries_in_rust_are_known_too():
    assert remedy(RuntimeError("Error: No space left on device (os error 28)")) == "free some space"
    assert remedy(RuntimeError("Error")) == ""


# --- signals
# --------------------------------------------------------------------------------------------------


def test_ctrl_c_while_building_is_one_line(tiny_flux_dir, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("paco_grpo.training.build.load_generator", interrupt)
    arguments = as_arguments(overrides_for(tiny_flux_dir, tmp_path))
    config = str(Path(script.__file__).parents[1] / "config/grpo.py:toy_t2is")
    assert script.main(["--config", config, *arguments]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: nothing was saved."
    assert not (tmp_path / "runs" / "run").exists()


def test_a_second_ctrl_c_is_one_line(hurt):
    def interrupt(_):
        raise KeyboardInterrupt

    status, line = hurt(interrupt)
    assert status == 130 and line.startswith("interrupted: ") and "resume_from=latest" in line


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_saves(hurt, tmp_path, number, status):
    ended, line = hurt(lambda _: signal.raise_signal(number), save_freq=0)
    assert ended == status and line.startswith("stopped: by a signal. To resume: ")
    assert (tmp_path / "runs/run/checkpoints/epoch_0001").is_dir()


CHILD = """
import importlib.util, time
spec = importlib.util.spec_from_file_location("train", {script!r})
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
train.end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_ends_with_its_launcher(monkeypatch):
    """torchrun gives its processes a session of their own, so that a kill of its group does not
    reach them.
    """
    monkeypatch.setenv("LOCAL_RANK", "0")
    child = CHILD.format(script=script.__file__)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, child], stdout=subprocess.PIPE, text=True
    )
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    state = Path(f"/proc/{pid}/stat")
    while state.is_file() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "it outlived its launcher"
        time.sleep(0.05)


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignal()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
