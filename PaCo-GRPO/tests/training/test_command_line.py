"""The command line, signals from outside, and two processes against one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import ROOT, overrides_for, write_edits

TRAIN = ["bash", str(ROOT / "scripts" / "single_node" / "train_flux.sh"), "toy_t2is"]


def start(flux: Path, folder: Path, processes: int = 1, **changes) -> subprocess.Popen:
    return launch(TRAIN, overrides_for(flux, folder, **changes), processes)


def launch(command: list[str], overrides: dict[str, str], processes: int = 1) -> subprocess.Popen:
    options = [f"--config.{key}={value}" for key, value in overrides.items()]
    environment = os.environ | {
        "PYTHON": sys.executable,
        "NUM_PROCESSES": str(processes),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    return subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 550) -> tuple[int, str]:
    _, said = process.communicate(timeout=timeout)
    return process.returncode, said


def weights(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / "run" / "checkpoints" / f"epoch_{epoch:04d}" / "state" / "trainable.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__resoluton": 3}, "error: unknown option config.train.resoluton. Did you mean config.train.resolution?"),
        ({"pretrained__model": "/no/such/model"}, "model folder /no/such/model does not exist"),
        ({"dataset": "/no/such/prompts"}, "config.dataset"),
        (
            {"train__reward_fn": "{'consistency_score': 1}", "train__reward_fn_kwargs": "{'consistency_score': {'base_url': 'http://127.0.0.1:9'}}"},
            "vllm_server/launch.sh",
        ),
    ],
    ids=["option", "model", "prompts", "judge"],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tiny_flux_dir, tmp_path, changes, said):
    status, text = finish(start(tiny_flux_dir, tmp_path, **changes))
    assert status == 2
    assert said in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_flux.sh", "train_flux_kontext.sh", "train_qwenimage_edit.sh"])
def test_configuration_name_is_needed(script):
    result = subprocess.run(
        ["bash", Path(TRAIN[1]).with_name(script)], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and result.stderr.startswith(f"usage: bash scripts/single_node/{script} NAME")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "name", "policy"),
    [
        ("train_flux_kontext.sh", "toy_kontext", "flux_kontext"),
        ("train_qwenimage_edit.sh", "toy_qwen_edit", "qwen_image_edit"),
    ],
)
def test_editors_train_from_the_command_line(tiny_folder, tmp_path, script, name, policy):
    """With one process and with two, which end in the same weights to rounding (tolerance as below)."""
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        changes = {"num_epochs": 1, "train__adam_epsilon": 1e-2, "train__learning_rate": 1e-2}
        overrides = overrides_for(tiny_folder(policy), folder, write_edits, **changes)
        status, said = finish(launch(["bash", str(Path(TRAIN[1]).with_name(script)), name], overrides, processes))
        assert status == 0, said
        assert (folder / "runs" / "run" / "checkpoints" / "epoch_0001" / "diffusers").is_dir()
        assert json.loads((folder / "runs" / "run" / "plan.json").read_text())["num_processes"] == processes
    one, two = weights(tmp_path / "1", 1), weights(tmp_path / "2", 1)
    assert max(value.abs().max() for name, value in one.items() if "lora_B" in name) > 1e-4  # they start at 0
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_sigterm_from_outside(tiny_flux_dir, tmp_path):
    process = start(tiny_flux_dir, tmp_path, num_epochs=10000, save_freq=0, eval_freq=0)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    status, said = finish(process)
    assert status == 128 + signal.SIGTERM
    assert "To resume: the same command with --config.run_name=run --config.resume_from=latest" in said
    assert "Traceback" not in said
    (checkpoint,) = (tmp_path / "runs" / "run" / "checkpoints").iterdir()
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert checkpoint.name == f"epoch_{last['epoch']:04d}"


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tiny_flux_dir, tmp_path):
    """DDP over gloo against one process: same rewards, advantages and losses; weights to rounding.

    Adam's epsilon is large here, because with a tiny one the first step is the sign of the gradient, and rounding of
    gradients near 0 then shows at full size. Tolerance 1e-6 against steps of about 1e-4.
    """
    changes = {
        "num_epochs": 2, "train__adam_epsilon": 1e-2, "train__gradient_step_per_epoch": 2, "train__num_inner_epochs": 2,
        "sample__num_images_per_prompt": 5, "sample__unique_sample_num_per_epoch": 2, "sample__batch_size": 5,
        "train__learning_rate": 1e-2, "test__num_images": 5,
    }  # fmt: skip
    for name, processes in (("one", 1), ("two", 2)):
        status, said = finish(start(tiny_flux_dir, tmp_path / name, processes, **changes))
        assert status == 0, said
    one, two = (weights(tmp_path / name, 2) for name in ("one", "two"))
    assert any(
        (value - start_).abs().max() > 1e-4
        for value, start_ in zip(one.values(), weights(tmp_path / "one", 1).values(), strict=True)
    )
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-6)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for first, second in zip(*rows, strict=True):
        for key, value in first.items():
            if key.startswith(("reward/", "advantage/", "train/grad", "train/loss", "eval/")):
                assert second[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
    evaluations = [
        [
            json.loads(line)["seed"]
            for line in (tmp_path / name / "runs" / "run" / "eval" / "epoch_0002" / "eval_data.jsonl")
            .read_text()
            .splitlines()
        ]
        for name in ("one", "two")
    ]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 5


@pytest.mark.long
def test_sigkill_and_resume_is_bit_identical(tiny_flux_dir, tmp_path):
    status, said = finish(start(tiny_flux_dir, tmp_path / "whole", num_epochs=6))
    assert status == 0, said
    folder = tmp_path / "killed"
    for kill in range(2):
        process = start(tiny_flux_dir, folder, num_epochs=6, resume_from="latest")
        checkpoints = folder / "runs" / "run" / "checkpoints"
        deadline = time.monotonic() + 240
        while not (checkpoints / f"epoch_{2 * kill + 1:04d}").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
    status, said = finish(start(tiny_flux_dir, folder, num_epochs=6, resume_from="latest"))
    assert status == 0, said
    one, two = weights(tmp_path / "whole", 6), weights(folder, 6)
    assert all(torch.equal(one[key], two[key]) for key in one)
    epochs = [
        json.loads(line)["epoch"] for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert epochs == [1, 2, 3, 4, 5, 6, 6]
