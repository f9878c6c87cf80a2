"""launch.sh, stop.sh and status.sh as a user types them, with a stand-in for vLLM; the real engines at the end."""

import os
import pty
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from serving_tools import ROOT, VLLM_PYTHON, all_ended, free_port

from paco_judge.client import JudgeClient, Pair
from vllm_server.interrupts import Interrupts
from vllm_server.launch import launch
from vllm_server.processes import Process
from vllm_server.settings import LaunchError, LaunchSettings


def test_launch_status_stop(shell):
    status, output, errors = shell.run("launch.sh")
    assert status == 0, errors
    assert "Engine: vllm" in output and f"Ready:  Judge at http://127.0.0.1:{shell.port}/v1" in output
    (row,) = shell.status()
    assert (row["state"], row["label"], row["name"], row["engine"]) == ("healthy", "test", "Judge", "vllm")
    assert "healthy" in shell.run("status.sh")[1]
    assert JudgeClient(f"http://127.0.0.1:{shell.port}", model="judge").check() == "Judge"
    pids = shell.record()["pids"]
    assert all(Process.of(pid) for pid in pids), "it survives the shell that started it"
    status, output, _ = shell.run("stop.sh")
    assert status == 0 and "Judge" in output and "ended" in output
    assert all_ended(pids)
    status, output, _ = shell.run("stop.sh")
    assert status == 0 and "Nothing runs with label 'test'" in output
    assert shell.status() == [] and "No servers" in shell.run("status.sh")[1]


def test_what_vllm_is_started_with(shell, model):
    assert shell.run("launch.sh", VLLM_EXTRA_ARGS="--seed 3", PYTHONPATH="/nowhere")[0] == 0
    record = shell.record()
    given = record["argv"]
    assert given[given.index("--model") + 1] == str(model), "relative folders become absolute"
    assert given[given.index("--max-model-len") + 1] == "2048", "no longer than the model's"
    assert "--enforce-eager" in given and given[-2:] == ["--seed", "3"]
    environment = record["env"]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2" and environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    assert not {"VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_MODEL_PATHS"} & environment.keys()
    assert "/nowhere" not in environment["PYTHONPATH"]
    assert Path(record["cwd"]) != shell.cwd


def test_gpus_are_used_together(shell):
    shell.install_gpus(8)
    del shell.environment["CUDA_VISIBLE_DEVICES"]
    assert shell.run("launch.sh", GPU_MEMORY_UTILIZATION="0.5")[0] == 0
    given = shell.record()["argv"]
    assert given[given.index("--tensor-parallel-size") + 1] == "4", "28 heads: not 8"
    assert given[given.index("--gpu-memory-utilization") + 1] == "0.5"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"VLLM_MODEL_PATHS": ""}, "VLLM_MODEL_PATHS is empty"),
        ({"VLLM_MODEL_PATHS": "nowhere"}, "nowhere does not exist: correct VLLM_MODEL_PATHS"),
        ({"VLLM_MODEL_PATHS": "."}, "has no config.json"),
        ({"VLLM_MODEL_NAMES": "a,b"}, "has 1 entries and VLLM_MODEL_NAMES 2"),
        ({"VLLM_MODEL_NAMES": "a b"}, "a served name must be"),
        ({"VLLM_MODEL_PATHS": "model,model", "VLLM_MODEL_NAMES": "a,b", "VLLM_TP": "1,2,3"}, "VLLM_TP has 3 entries"),
        ({"VLLM_TP": "two"}, "VLLM_TP must be a whole number"),
        ({"VLLM_TP": "2"}, "VLLM_TP is for vLLM on GPUs, and there is no GPU"),
        ({"VLLM_REPLICAS": "0"}, "VLLM_REPLICAS must lie between 1"),
        ({"VLLM_LORA": "adapter"}, "VLLM_LORA must be name=path"),
        ({"VLLM_LORA": "adapter=nowhere"}, "has no adapter_config.json"),
        ({"VLLM_LORA": "Judge=nowhere"}, "have a name twice"),
        ({"VLLM_EXTRA_ARGS": "--a 'b"}, "VLLM_EXTRA_ARGS cannot be split"),
        ({"VLLM_API_KEY": "a b"}, "VLLM_API_KEY must be printable ASCII"),
        ({"VLLM_GATEWAY": "never"}, "VLLM_GATEWAY must be one of auto, always"),
        ({"VLLM_START_TIMEOUT": "soon"}, "VLLM_START_TIMEOUT must be a number"),
        ({"VLLM_HOST": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "there is no GPU 0 here (nvidia-smi lists no GPU)"),
        ({"VLLM_LABEL": "../x"}, "VLLM_LABEL must be"),
        ({"VLLM_LABEL": ".."}, "VLLM_LABEL must be"),
        ({"VLLM_PORT": "http"}, "VLLM_PORT must be a whole number, got 'http'"),
        ({"VLLM_PORT": "70000"}, "VLLM_PORT must lie between 1 and 65535"),
        ({"MAX_MODEL_LEN": "8k"}, "MAX_MODEL_LEN must be a whole number"),
        ({"GPU_MEMORY_UTILIZATION": "85"}, "GPU_MEMORY_UTILIZATION must lie between"),
        ({"VLLM_ENGINE": "tgi"}, "VLLM_ENGINE must be one of auto, vllm, transformers"),
        ({"VLLM_ENGINE": "vllm", "VLLM_PYTHON": "/nowhere/python"}, "vLLM is not installed in /nowhere/python"),
        ({"PACO_RUNTIME_DIR": "run"}, "must be an absolute path"),
    ],
)
def test_bad_settings_are_said_before_anything_starts(shell, monkeypatch, variables, message):
    monkeypatch.chdir(shell.cwd)
    monkeypatch.setenv("PATH", shell.environment["PATH"])
    with pytest.raises(LaunchError) as error:
        launch(shell.environment | variables, False, Interrupts())
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not Path(shell.environment["FAKE_VLLM_RECORD"]).exists(), "nothing was started"


def test_an_error_is_one_line_on_the_command_line(shell):
    status, _, errors = shell.run("launch.sh", VLLM_PORT="http")
    assert status == 1 and errors == "launch: VLLM_PORT must be a whole number, got 'http'\n"


def test_a_hub_name_that_cannot_be_had_is_said(shell):
    _, _, errors = shell.run("launch.sh", VLLM_MODEL_PATHS="nobody/no-such-model", HF_HUB_OFFLINE="1")
    assert "neither a folder here" in errors and "VLLM_MODEL_PATHS" in errors and "Traceback" not in errors


def test_a_lora_adapter_is_not_a_model(shell, model):
    (model / "config.json").rename(model / "adapter_config.json")
    assert "export merged weights first" in shell.run("launch.sh")[2]


def test_a_taken_port_is_said(shell):
    with socket.create_server(("127.0.0.1", shell.port)):
        status, _, errors = shell.run("launch.sh")
    assert status == 1 and f"cannot listen on 127.0.0.1:{shell.port}" in errors and "VLLM_PORT" in errors


def test_a_label_in_use_is_said_and_a_dead_one_is_replaced(shell):
    assert shell.run("launch.sh")[0] == 0
    status, _, errors = shell.run("launch.sh", VLLM_PORT=str(free_port()))
    assert status == 1 and "label 'test' is in use" in errors and "stop.sh" in errors
    (row,) = shell.status()
    for pid in shell.record()["pids"]:
        os.kill(pid, signal.SIGKILL)
    assert all_ended([row["pid"]])
    assert shell.status()[0]["state"] == "ended"
    assert shell.run("launch.sh")[0] == 0


def test_a_server_that_dies_while_loading_is_said_at_once_with_its_log(shell):
    start = time.monotonic()
    status, _, errors = shell.run("launch.sh", FAKE_VLLM="dies")
    assert time.monotonic() - start < 60
    assert status == 1 and "ended with status 1 while loading" in errors
    assert "no room for the key-value cache" in errors and "Traceback" not in errors
    assert shell.status() == []


def test_a_server_that_never_answers_is_ended_after_the_timeout(shell):
    status, _, errors = shell.run("launch.sh", FAKE_VLLM="hangs", VLLM_START_TIMEOUT="2")
    assert status == 1 and "did not answer within 2 s (VLLM_START_TIMEOUT)" in errors and "Loading a model" in errors
    assert all_ended(shell.record()["pids"]) and shell.status() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_launch_leaves_no_process(shell, number):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.record()["pids"]
    os.killpg(launch.pid, number)
    _, errors = launch.communicate(timeout=60)
    assert launch.returncode == 130 and "nothing is left running" in errors
    assert all_ended(pids) and shell.status() == []


def test_ctrl_c_in_a_terminal_while_loading_leaves_no_process(shell):
    launcher, terminal = pty.openpty()
    launch = subprocess.Popen(
        ["setsid", "--ctty", "bash", str(ROOT / "vllm_server" / "launch.sh")],
        env=shell.environment | {"FAKE_VLLM": "hangs, stubborn"}, cwd=shell.cwd,
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    pids = shell.record()["pids"]
    os.write(launcher, b"\x03")
    assert launch.wait(timeout=60) == 130
    assert all_ended(pids) and shell.status() == []
    os.close(launcher)
    os.close(terminal)


def test_a_launch_can_be_stopped_while_loading(shell):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.record()["pids"]
    deadline = time.monotonic() + 30
    while not shell.status():
        assert time.monotonic() < deadline
    assert shell.run("stop.sh")[0] == 0
    launch.communicate(timeout=60)
    assert launch.returncode == 1 and all_ended(pids)


def test_a_stubborn_server_is_ended_hard_and_leftovers_too(shell):
    assert shell.run("launch.sh", FAKE_VLLM="stubborn")[0] == 0
    pids = shell.record()["pids"]
    os.kill(pids[0], signal.SIGKILL)  # its child lives on
    assert shell.run("stop.sh")[0] == 0
    assert all_ended(pids)


def test_stop_leaves_a_process_alone_that_has_taken_over_the_pid(shell):
    assert shell.run("launch.sh")[0] == 0
    pids = shell.record()["pids"]
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    state = Path(shell.environment["PACO_RUNTIME_DIR"]) / "test" / "state.json"
    original = state.read_text()
    state.write_text(original.replace(str(pids[0]), str(innocent.pid)))
    assert shell.run("stop.sh")[0] == 0
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()
    for pid in pids:
        if Process.of(pid):
            os.kill(pid, signal.SIGKILL)


def test_two_launches_beside_each_other(shell, tmp_path):
    other = {"VLLM_PORT": str(free_port()), "VLLM_LABEL": "other", "FAKE_VLLM_RECORD": str(tmp_path / "other")}
    assert shell.run("launch.sh")[0] == 0
    assert shell.run("launch.sh", **other)[0] == 0
    assert [(row["label"], row["state"]) for row in shell.status()] == [("other", "healthy"), ("test", "healthy")]
    assert shell.run("stop.sh")[0] == 0
    assert [(row["label"], row["state"]) for row in shell.status()] == [("other", "healthy")]


def test_in_the_foreground_signals_end_the_server(shell):
    launch = shell.start("launch.sh", "--foreground")
    for line in launch.stdout:
        if line.startswith("Ready:"):
            break
    pids = shell.record()["pids"]
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=60)
    assert launch.returncode == 0
    assert all_ended(pids) and shell.status() == []


def test_in_the_foreground_the_servers_end_is_ours(shell):
    launch = shell.start("launch.sh", "--foreground")
    for line in launch.stdout:
        if line.startswith("Ready:"):
            break
    pids = shell.record()["pids"]
    os.kill(pids[0], signal.SIGKILL)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL
    assert all_ended(pids)


def test_the_runtime_folder_must_be_ours(shell, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "not a folder of this user" in shell.run("launch.sh", PACO_RUNTIME_DIR=str(tmp_path / "link"))[2]


def test_a_damaged_state_is_said(shell, tmp_path):
    folder = tmp_path / "run" / "test"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{")
    for script in ("launch.sh", "stop.sh", "status.sh"):
        status, _, errors = shell.run(script)
        assert status == 1 and "is damaged" in errors
    (folder / "state.json").unlink()


def test_default_names_are_the_folders():
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/models/PaCo-Reward-7B/"})
    assert settings.models[0].name == "PaCo-Reward-7B" and settings.port == 8000 and settings.label == "default"
    with pytest.raises(LaunchError, match="a name twice"):
        LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/a,/b", "VLLM_MODEL_NAMES": "x,x"})


def judge_scores(url: str, model: str, tiny) -> list:
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1), "Do the two images show the same? Yes or No") for i in range(8)]
    return JudgeClient(url, model=model, deadline_s=120).score_blocking(pairs)


@pytest.mark.slow
def test_the_transformers_engine_is_launched(shell, judge_folder, tiny):
    status, output, errors = shell.run("launch.sh", VLLM_MODEL_PATHS=str(judge_folder), VLLM_ENGINE="transformers")
    assert status == 0, errors
    assert "Engine: transformers" in output
    verdicts = judge_scores(f"http://127.0.0.1:{shell.port}", "judge", tiny)
    assert all(verdict.ok or "neither Yes nor No" in verdict.error for verdict in verdicts)
    pid = shell.status()[0]["pid"]
    assert shell.run("stop.sh")[0] == 0 and all_ended([pid])


@pytest.mark.slow
def test_a_model_that_the_engine_cannot_serve_is_said(shell, model):
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    status, _, errors = shell.run("launch.sh", VLLM_ENGINE="transformers")
    assert status == 1 and "the transformers engine serves qwen2_5_vl" in errors


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_gives_the_scores_of_transformers(shell, judge_folder, tiny):
    """The same top 20 log-probabilities from both engines, through the same launch and the same client."""
    vllm = {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_ENGINE": "vllm", "VLLM_LABEL": "vllm", "VLLM_START_TIMEOUT": "1500"}
    vllm |= {"VLLM_PORT": str(free_port()), "VLLM_MODEL_PATHS": str(judge_folder)}
    status, _, errors = shell.run("launch.sh", timeout=1600, **vllm)
    assert status == 0, errors
    own = {"VLLM_ENGINE": "transformers", "VLLM_MODEL_PATHS": str(judge_folder)}
    assert shell.run("launch.sh", timeout=600, **own)[0] == 0
    urls = [f"http://127.0.0.1:{port}" for port in (vllm["VLLM_PORT"], shell.port)]
    theirs, ours = (judge_scores(url, "Judge", tiny) for url in urls)
    assert [verdict.ok for verdict in theirs] == [verdict.ok for verdict in ours]
    for one, other in zip(theirs, ours, strict=True):
        assert one.p_yes == pytest.approx(other.p_yes, abs=2e-2)
