"""Output folders of judge training: one process at a time, room on the disk, what is resumed."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from training_tools import adapter, train_config

from paco_reward.errors import PacoRewardError
from paco_reward.launch import run
from paco_reward.output import (
    changes,
    check_free,
    check_space,
    is_disk_full,
    locked,
    with_resume,
    write_config,
)


def test_a_folder_is_locked_until_its_process_ends_and_names_it(tmp_path):
    hold = "import sys, time; from pathlib import Path; from paco_reward.output import locked\n"
    hold += "with locked(Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "locked\n"
    for _ in range(2):  # asking does not change the name
        with (
            pytest.raises(PacoRewardError, match=rf"in use by process {holder.pid} on \S+; end it"),
            locked(tmp_path),
        ):
            pass
    holder.kill()
    holder.wait()
    with locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_forked_helper_does_not_hold_the_folder(tmp_path):
    forking = multiprocessing.get_context("fork")
    is_running = forking.Event()

    def help_out():
        is_running.set()
        time.sleep(60)

    with locked(tmp_path):
        helper = forking.Process(target=help_out)
        helper.start()
        assert is_running.wait(20)
    with locked(tmp_path):
        helper.kill()
        helper.join()


def test_room_is_asked_for_before_it_is_needed(tmp_path, monkeypatch):
    model = torch.nn.Linear(1 << 10, 1 << 10, bias=False)  # 4 MiB
    free = SimpleNamespace(free=20 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    check_free(tmp_path, 20 << 20)
    with pytest.raises(PacoRewardError, match="20 MiB free, but about 21 MiB"):
        check_free(tmp_path, 21 << 20)

    def needs(mib, **options):
        args = SimpleNamespace(
            **{"save_strategy": "steps", "save_total_limit": 3, "save_only_model": False} | options
        )
        free.free = mib << 20
        check_space(tmp_path, model, args)
        free.free -= 1
        with pytest.raises(PacoRewardError, match=f"about {mib} MiB"):
            check_space(tmp_path, model, args)

    needs(4 + 4 * 12)
    needs(4 + 4 * 4, save_only_model=True)
    needs(4 + 12, save_total_limit=None)
    needs(4, save_strategy="no")
    for step in (4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    needs(4 + 2 * 12)  # two of the four are there


def test_a_full_disk_is_recognized_in_each_librarys_words():
    assert is_disk_full(OSError(28, "No space left on device"))
    for text in (
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "[enforce fail at inline_container.cc:659] . PytorchStreamWriter failed writing file data/0",
    ):
        assert is_disk_full(RuntimeError(text))
    assert not is_disk_full(ValueError("shapes differ")) and not is_disk_full(OSError(2, "gone"))


@pytest.fixture
def resumable(tmp_path):
    """A configuration whose output folder has two checkpoints."""
    for step in (9, 10):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        state = {"global_step": step, "max_steps": 20}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (checkpoint / "optimizer.pt").touch()
    return {"output_dir": str(tmp_path), "do_train": True, "learning_rate": 1e-4}


@pytest.fixture(autouse=True)
def all_messages(caplog):
    caplog.set_level(logging.INFO, "paco_reward")


def test_a_new_folder_is_not_resumed(tmp_path, caplog):
    config = {"output_dir": str(tmp_path / "new"), "do_train": True}
    assert with_resume(config) == config and not caplog.messages


def test_the_last_checkpoint_is_resumed_and_differences_are_listed(resumable, caplog):
    folder = Path(resumable["output_dir"])
    write_config(folder, resumable | {"dataset": "a"})
    changed = resumable | {"learning_rate": 2e-4, "lora_rank": 8}
    found = with_resume(changed)
    assert found == changed | {"resume_from_checkpoint": str(folder / "checkpoint-10")}
    assert caplog.messages == [
        f"resuming from {folder / 'checkpoint-10'}, step 10 of 20",
        "differs from the training that is resumed: learning_rate 0.0002, before 0.0001",
        "differs from the training that is resumed: dataset None, before 'a'",
        "differs from the training that is resumed: lora_rank 8, before None",
    ]
    write_config(folder, found)
    assert changes(folder, changed) == []  # the checkpoint itself is no difference


def test_a_checkpoint_that_was_cut_off_is_not_resumed(resumable, caplog):
    folder = Path(resumable["output_dir"])
    state = folder / "checkpoint-10" / "trainer_state.json"
    for content in (None, "", '{"global_', "[]"):
        state.unlink(missing_ok=True)
        if content is not None:
            state.write_text(content)
        caplog.clear()
        found = with_resume(resumable)
        assert found["resume_from_checkpoint"] == str(folder / "checkpoint-9")
        assert "checkpoint-10 is incomplete" in caplog.messages[0]
    (folder / "checkpoint-9" / "trainer_state.json").unlink()
    assert with_resume(resumable) == resumable | {"overwrite_output_dir": True}


def test_a_checkpoint_without_the_optimizer_is_announced(resumable, caplog):
    (Path(resumable["output_dir"]) / "checkpoint-10" / "optimizer.pt").unlink()
    with_resume(resumable)
    assert "no optimizer state" in caplog.text


def test_what_the_user_chose_is_kept(resumable, caplog):
    for choice in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "mine"}):
        assert with_resume(resumable | choice) == resumable | choice
    assert not caplog.messages


def test_finished_weights_are_not_overwritten(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    config = {"output_dir": str(tmp_path), "do_train": True}
    with pytest.raises(PacoRewardError, match=r"another output_dir, or overwrite_output_dir=true"):
        with_resume(config)
    assert with_resume(config | {"overwrite_output_dir": True})


def test_damaged_options_of_a_training_are_a_message(resumable):
    file = Path(resumable["output_dir"]) / "train.yaml"
    for content in ("a: [", "- 1", ""):
        file.write_text(content)
        with pytest.raises(PacoRewardError, match=r"(?s)train\.yaml .*delete it"):
            with_resume(resumable)


# --- real trainings -------------------------------------------------------------------------------


def start(config: dict, file: Path, processes: int, *overrides: str) -> psutil.Popen:
    """``paco-reward train`` in its own session."""
    file.write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "HF_DATASETS_CACHE": str(file.with_suffix("")),
    }
    command = [sys.executable, "-m", "paco_reward.cli", "train", str(file), *overrides]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return psutil.Popen(command, env=environment, start_new_session=True, **options)


def wait_for(condition, process: psutil.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.1)


@pytest.fixture
def long_training(judge_dir, data_dir, tmp_path) -> dict:
    """A training of many steps that saves every second one."""
    changes = {"max_steps": 4000, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    changes |= {"overwrite_output_dir": False, "per_device_train_batch_size": 2}
    changes |= {"first_token_weight": 0.1, "learning_rate": 1e-4}
    return train_config(judge_dir, data_dir, tmp_path / "out", **changes)


@pytest.mark.slow
def test_a_killed_training_leaves_no_process_and_is_resumed(long_training, tmp_path):
    """kill -9 of the command alone, amid two processes; then again with other options."""
    output = tmp_path / "out"
    training = start(long_training, tmp_path / "a.yaml", 2)
    wait_for(lambda: list(output.glob("checkpoint-*/trainer_state.json")), training)
    with pytest.raises(PacoRewardError, match=f"is in use by process {training.pid} on "):
        run(str(tmp_path / "a.yaml"), [], {})
    descendants = training.children(recursive=True)
    assert len(descendants) >= 2
    training.kill()
    _, alive = psutil.wait_procs([training, *descendants], timeout=20)
    assert not alive

    (output / "checkpoint-99999").mkdir()  # as if the kill had come while one was written
    saved = max(int(file.name[11:]) for file in output.glob("checkpoint-*[0-8]"))
    more = ["learning_rate=2e-4", f"max_steps={saved + 2}"]
    resumed = start(long_training, tmp_path / "a.yaml", 2, *more)
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said[-3000:]
    assert "resuming from" in said and "checkpoint-99999 is incomplete" in said
    assert "learning_rate 0.0002, before 0.0001" in said
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == saved + 2 and adapter(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "processes"),
    [
        (signal.SIGINT, 130, 2),
        (signal.SIGTERM, 143, 1),
        pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, 2, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_training_with_its_processes(
    sent, status, processes, long_training, tmp_path
):
    training = start(long_training, tmp_path / "a.yaml", processes)
    wait_for(lambda: list((tmp_path / "out").glob("checkpoint-*")), training)
    descendants = training.children(recursive=True)
    training.send_signal(sent)
    _, alive = psutil.wait_procs([training, *descendants], timeout=60)
    assert not alive and training.returncode == status, training.stdout.read()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_no_room_for_the_weights_is_one_line(processes, judge_dir, data_dir, tmp_path):
    """A limit of the size of files stands in for a full disk: it fails at the same call."""
    config = train_config(judge_dir, data_dir, tmp_path / "out", max_steps=1, lora_rank=64)
    limited = f"ulimit -f 200; exec {sys.executable} -m paco_reward.cli train {tmp_path / 'a.yaml'}"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", limited],
        env=environment | {"HF_DATASETS_CACHE": str(data_dir / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "free some space" in line
    assert "Traceback" not in done.stderr.partition("error: ")[0]
