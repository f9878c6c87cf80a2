"""launch.sh, stop.sh and status.sh as a user types them: one model, on a fake vLLM; real engines at the end."""

import os
import pty
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from serving_tools import ROOT, VLLM_PYTHON, all_ended, free_port, option, wait_for

from paco_judge.client import JudgeClient, Pair
from vllm_server.launch import Interrupts, launch
from vllm_server.processes import Process
from vllm_server.settings import LaunchError


def test_launch_status_stop(shell):
    output = shell.launch()
    assert "Engine: vllm" in output and f"Ready:  Judge at {shell.url}/v1" in output
    (row,) = shell.status()
    assert (row["state"], row["label"], row["name"], row["engine"]) == ("healthy", "test", "Judge", "vllm")
    status, table, _ = shell.run("status.sh")
    assert status == 0 and "healthy" in table
    assert JudgeClient(shell.url, model="judge").check() == "Judge"
    pids = shell.fake_pids()
    assert all(map(Process.of, pids)), "it survives the shell that started it"
    assert "ended" in shell.run("stop.sh")[1]
    all_ended(pids)
    assert "Nothing runs with label 'test'" in shell.run("stop.sh")[1]
    assert shell.status() == [] and "No servers" in shell.run("status.sh")[1]


def test_command_and_environment_of_vllm(shell, model):
    shell.launch(VLLM_EXTRA_ARGS="--seed 3", PYTHONPATH="/nowhere")
    (record,) = shell.records()
    words, environment = record["argv"], record["env"]
    assert option(words, "--model") == str(model), "relative folders become absolute"
    assert option(words, "--max-model-len") == "2048", "no longer than the model's"
    assert "--enforce-eager" in words and words[-2:] == ["--seed", "3"]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2" and environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    assert not {"VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_MODEL_PATHS"} & environment.keys()
    assert "/nowhere" not in environment["PYTHONPATH"]
    assert Path(record["cwd"]) != shell.cwd


def test_gpus_are_used_together(shell):
    shell.install_gpus(8)
    del shell.environment["CUDA_VISIBLE_DEVICES"]
    assert "GPUs 4,5,6,7 stay unused" in shell.launch(GPU_MEMORY_UTILIZATION="0.5")
    words = shell.records()[0]["argv"]
    assert option(words, "--tensor-parallel-size") == "4", "28 heads: not 8"
    assert option(words, "--gpu-memory-utilization") == "0.5"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"VLLM_MODEL_PATHS": ""}, "VLLM_MODEL_PATHS"),
        ({"VLLM_MODEL_PATHS": "nowhere"}, "nowhere"),
        ({"VLLM_MODEL_PATHS": "."}, "config.json"),
        ({"VLLM_MODEL_PATHS": "nobody/no-such-model"}, "nobody/no-such-model"),
        ({"VLLM_MODEL_NAMES": "a,b"}, "VLLM_MODEL_NAMES"),
        ({"VLLM_MODEL_NAMES": "a b"}, "'a b'"),
        ({"VLLM_MODEL_PATHS": "model,model", "VLLM_MODEL_NAMES": "a,a"}, "VLLM_MODEL_NAMES"),
        ({"VLLM_MODEL_PATHS": "model,model", "VLLM_MODEL_NAMES": "a,b", "VLLM_TP": "1,2,3"}, "VLLM_TP"),
        ({"VLLM_TP": "two"}, "VLLM_TP"),
        ({"VLLM_TP": "2"}, "VLLM_TP"),
        ({"VLLM_REPLICAS": "0"}, "VLLM_REPLICAS"),
        ({"VLLM_LORA": "adapter"}, "VLLM_LORA"),
        ({"VLLM_LORA": "adapter=nowhere"}, "nowhere"),
        ({"VLLM_LORA": "Judge=nowhere"}, "VLLM_LORA"),
        ({"VLLM_EXTRA_ARGS": "--a 'b"}, "VLLM_EXTRA_ARGS"),
        ({"VLLM_API_KEY": "a b"}, "VLLM_API_KEY"),
        ({"VLLM_GATEWAY": "never"}, "VLLM_GATEWAY"),
        ({"VLLM_START_TIMEOUT": "soon"}, "VLLM_START_TIMEOUT"),
        ({"VLLM_HOST": "203.0.113.7"}, "203.0.113.7"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES"),
        ({"VLLM_LABEL": "../x"}, "VLLM_LABEL"),
        ({"VLLM_LABEL": ".."}, "VLLM_LABEL"),
        ({"VLLM_PORT": "http"}, "VLLM_PORT"),
        ({"VLLM_PORT": "70000"}, "VLLM_PORT"),
        ({"MAX_MODEL_LEN": "8k"}, "MAX_MODEL_LEN"),
        ({"GPU_MEMORY_UTILIZATION": "85"}, "GPU_MEMORY_UTILIZATION"),
        ({"VLLM_ENGINE": "tgi"}, "VLLM_ENGINE"),
        ({"VLLM_ENGINE": "vllm", "VLLM_PYTHON": "/nowhere/python"}, "/nowhere/python"),
        ({"PACO_RUNTIME_DIR": "run"}, "PACO_RUNTIME_DIR"),
        ({"PACO_RUNTIME_DIR": "{cwd}/link"}, "PACO_RUNTIME_DIR"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(shell, monkeypatch, variables, named):
    (shell.cwd / "elsewhere").mkdir()
    (shell.cwd / "link").symlink_to(shell.cwd / "elsewhere")
    monkeypatch.chdir(shell.cwd)
    monkeypatch.setenv("PATH", shell.environment["PATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    variables = {name: value.format(cwd=shell.cwd) for name, value in variables.items()}
    with pytest.raises(LaunchError) as error:
        launch(shell.environment | variables, False, Interrupts())
    assert named in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not Path(shell.environment["FAKE_VLLM_RECORD"]).exists(), "nothing was started"


def test_an_error_is_one_line_on_the_command_line(shell):
    errors = shell.failed_launch(VLLM_PORT="http")
    assert errors.startswith("launch: VLLM_PORT") and errors.count("\n") == 1


def test_a_lora_adapter_is_not_a_model(shell, model):
    (model / "config.json").rename(model / "adapter_config.json")
    assert "LoRA adapter" in shell.failed_launch()


def test_a_port_in_use_is_refused(shell):
    with socket.create_server(("127.0.0.1", shell.port)):
        assert "VLLM_PORT" in shell.failed_launch()


def test_a_label_in_use_is_refused_and_that_of_a_dead_launch_is_replaced(shell):
    shell.launch()
    assert "label 'test' is in use" in shell.failed_launch(VLLM_PORT=str(free_port()))
    (row,) = shell.status()
    for pid in shell.fake_pids():
        os.kill(pid, signal.SIGKILL)
    all_ended([row["pid"]])
    assert shell.status()[0]["state"] == "ended"
    shell.launch()


def test_a_server_that_dies_while_loading_shows_its_log(shell):
    errors = shell.failed_launch(FAKE_VLLM="dies")
    assert "ended with status 1 while loading" in errors and "no room for the key-value cache" in errors
    assert shell.status() == []


def test_a_server_that_never_answers_is_ended_after_the_timeout(shell):
    errors = shell.failed_launch(FAKE_VLLM="hangs", VLLM_START_TIMEOUT="2")
    assert "VLLM_START_TIMEOUT" in errors and "Loading a model" in errors
    all_ended(shell.fake_pids())
    assert shell.status() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_launch_leaves_no_process(shell, number):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.fake_pids()
    os.killpg(launch.pid, number)
    _, errors = launch.communicate(timeout=60)
    assert launch.returncode == 130 and "nothing is left running" in errors
    all_ended(pids)
    assert shell.status() == []


def test_ctrl_c_in_a_terminal_leaves_no_process(shell):
    launcher, terminal = pty.openpty()
    launch = subprocess.Popen(
        ["setsid", "--ctty", "bash", str(ROOT / "vllm_server" / "launch.sh")],
        env=shell.environment | {"FAKE_VLLM": "hangs, stubborn"}, cwd=shell.cwd,
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    pids = shell.fake_pids()
    os.write(launcher, b"\x03")
    assert launch.wait(timeout=60) == 130
    all_ended(pids)
    os.close(launcher)
    os.close(terminal)


def test_a_launch_can_be_stopped_while_loading(shell):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.fake_pids()
    wait_for(shell.status)
    shell.stop()
    launch.communicate(timeout=60)
    assert launch.returncode == 1
    all_ended(pids)


def test_stop_ends_a_stubborn_server_and_children_that_outlive_their_server(shell):
    shell.launch(FAKE_VLLM="stubborn")
    pids = shell.fake_pids()
    os.kill(pids[0], signal.SIGKILL)
    shell.stop()
    all_ended(pids)


def test_stop_leaves_a_process_with_a_reused_pid_alone(shell):
    shell.launch()
    pids = shell.fake_pids()
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    state = shell.state_file()
    state.write_text(state.read_text().replace(str(pids[0]), str(innocent.pid)))
    shell.stop()
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()
    for pid in filter(Process.of, pids):
        os.kill(pid, signal.SIGKILL)


def test_signals_end_a_foreground_launch(shell):
    launch = shell.launch_in_foreground()
    pids = shell.fake_pids()
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=60)
    assert launch.returncode == 0
    all_ended(pids)
    assert shell.status() == []


def test_a_foreground_launch_ends_with_its_server(shell):
    launch = shell.launch_in_foreground()
    pids = shell.fake_pids()
    os.kill(pids[0], signal.SIGKILL)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL
    all_ended(pids)


def test_a_damaged_state_is_reported(shell):
    state = shell.state_file()
    state.parent.mkdir(parents=True)
    state.write_text("{")
    for script in ("launch.sh", "stop.sh", "status.sh"):
        status, _, errors = shell.run(script)
        assert status == 1 and str(state) in errors
    state.unlink()


def judge_scores(url: str, model: str, tiny) -> list:
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1), "Do the two images show the same? Yes or No") for i in range(8)]
    return JudgeClient(url, model=model, deadline_s=120).score_blocking(pairs)


@pytest.mark.slow
def test_the_transformers_engine_is_launched(shell, judge_folder, tiny):
    assert "Engine: transformers" in shell.launch(VLLM_MODEL_PATHS=str(judge_folder), VLLM_ENGINE="transformers")
    verdicts = judge_scores(shell.url, "judge", tiny)
    assert all(verdict.ok or "neither Yes nor No" in verdict.error for verdict in verdicts)
    pid = shell.status()[0]["pid"]
    shell.stop()
    all_ended([pid])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_gives_the_scores_of_transformers(shell, judge_folder, tiny):
    """The same top 20 log-probabilities from both engines, through the same launch and the same client."""
    vllm = {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_ENGINE": "vllm", "VLLM_LABEL": "vllm", "VLLM_START_TIMEOUT": "1500"}
    vllm |= {"VLLM_PORT": str(free_port()), "VLLM_MODEL_PATHS": str(judge_folder)}
    shell.launch(timeout=1600, **vllm)
    shell.launch(timeout=600, VLLM_ENGINE="transformers", VLLM_MODEL_PATHS=str(judge_folder))
    theirs = judge_scores(f"http://127.0.0.1:{vllm['VLLM_PORT']}", "Judge", tiny)
    ours = judge_scores(shell.url, "Judge", tiny)
    assert [verdict.ok for verdict in theirs] == [verdict.ok for verdict in ours]
    for one, other in zip(theirs, ours, strict=True):
        assert one.p_yes == pytest.approx(other.p_yes, abs=2e-2)
