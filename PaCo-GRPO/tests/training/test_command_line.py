"""Training started by its scripts: exit status, error messages, signals."""

import os
import resource
import signal

import pytest
import torch
from tiny_run import ROOT, as_arguments, load_script, overrides_for, tiny_options

from paco_grpo.options import ConfigError
from paco_grpo.training.checkpoints import Checkpoints
from paco_grpo.training.checks import require_promised_gpu
from paco_grpo.training.stopping import StopSignal
from paco_grpo.training.trainer import Trainer


def test_bad_input_is_one_clear_line(tiny_flux_dir, tmp_path, capsys):
    options = as_arguments(overrides_for(tiny_flux_dir, tmp_path, train__resoluton=3))
    assert load_script("train").main(["--config", f"{ROOT}/config/grpo.py:toy_t2is", *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()[-1:]
    assert error.startswith("error: ") and "Did you mean config.train.resolution" in error


def test_promised_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: A100'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for environment in ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}):
        with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU=true"):
            require_promised_gpu(environment)
        require_promised_gpu(environment | {"ACCELERATE_USE_CPU": "true"})
    require_promised_gpu({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (None, 130)])
def test_a_signal_saves_and_a_second_ctrl_c_ends_at_once(
    tiny_flux_dir, tmp_path, monkeypatch, capsys, caplog, number, status
):
    calls = []
    sample = Trainer._sample

    def signal_then_sample(trainer, *arguments):
        calls.append(1)
        if len(calls) == 2:
            if number is None:
                raise KeyboardInterrupt
            signal.raise_signal(number)
        return sample(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_sample", signal_then_sample)
    options = tiny_options(tiny_flux_dir, tmp_path, save_freq=0)
    assert load_script("train").train(options, "toy_t2is") == status
    said = capsys.readouterr().err.splitlines() if number is None else caplog.messages
    assert "--config.resume_from=latest" in said[-1]
    saved = (tmp_path / "runs/run/checkpoints/epoch_0001").is_dir()
    assert saved == (number is not None)


def test_a_full_disk_is_one_message(tiny_flux_dir, tmp_path, monkeypatch, capsys):
    save = Checkpoints.save
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_full_disk(checkpoints):
        if checkpoints.state.epoch == 1:
            return save(checkpoints)
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, most[1]))
        try:
            return save(checkpoints)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)

    monkeypatch.setattr(Checkpoints, "save", save_on_full_disk)
    assert load_script("train").train(tiny_options(tiny_flux_dir, tmp_path), "toy_t2is") == 4
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.count("epoch_0002 could not be written") == 1 and "resume_from=latest" in error
    assert (tmp_path / "runs/run/checkpoints/epoch_0001").is_dir()


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignal()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
