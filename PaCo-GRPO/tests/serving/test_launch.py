"""launch.sh, stop.sh and status.sh as a user types them: one model, on a fake vLLM; real engines at the end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from serving_tools import FAKE, all_ended, free_port, option, wait_for

from paco_judge.client import JudgeClient, Pair
from vllm_server import engines
from vllm_server.launch import Interrupts, launch
from vllm_server.processes import Process
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import runtime_root


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
    shell.launch(VLLM_EXTRA_ARGS="--seed 3", PYTHONPATH="/nowhere", VLLM_MAX_IMAGES="5")
    (record,) = shell.records()
    words, environment = record["argv"], record["env"]
    assert option(words, "--model") == str(model), "relative folders become absolute"
    assert option(words, "--max-model-len") == "2048", "no longer than the model's"
    assert "--enforce-eager" in words and words[-2:] == ["--seed", "3"]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2" and environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    assert not {"VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_MODEL_PATHS"} & environment.keys()
    assert "PYTHONPATH" not in environment
    assert json.loads(option(words, "--limit-mm-per-prompt")) == {"image": 5, "video": 0}
    assert Path(record["cwd"]) != shell.cwd


def test_an_old_vllm_starts_and_says_that_it_fetches_images(shell):
    """The fake vLLM does not know --allowed-media-domains; with a list of hosts it is refused."""
    first = shell.launch().splitlines()[0]
    assert "too old to forbid remote images" in first
    (record,) = shell.records()
    assert "--allowed-media-domains" not in record["argv"]
    assert record["env"]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    shell.stop()
    assert "VLLM_MEDIA_HOSTS" in shell.failed_launch(VLLM_MEDIA_HOSTS="a.example")


def test_a_vllm_that_can_forbids_remote_images(shell):
    (site,) = shell.vllm.glob("lib/python3*/site-packages")
    (site / "vllm" / "engine").mkdir()
    (site / "vllm" / "engine" / "arg_utils.py").write_text('"--allowed-media-domains"')
    shell.launch(VLLM_MEDIA_HOSTS="a.example, b.example")
    words = shell.records()[0]["argv"]
    at = words.index("--allowed-media-domains")
    assert words[at + 1 : at + 3] == ["a.example", "b.example"]


@pytest.mark.parametrize("found", ["venv", "conda", "program"])
def test_an_environment_with_nothing_but_vllm(shell, found):
    """What a user has activated, or put on the PATH, serves; the launcher itself runs in it too."""
    environment = {name: value for name, value in shell.environment.items() if name not in ("PYTHON", "VLLM_PYTHON")}
    environment["PATH"] = "/usr/bin:/bin"
    if found == "program":
        shell.program("vllm", "").write_text(f"#!{shell.vllm}/bin/python\n")
        environment["PATH"] = f"{shell.bin}:/usr/bin:/bin"
    else:
        environment["PATH"] = f"{shell.vllm}/bin:/usr/bin:/bin"
        environment["VIRTUAL_ENV" if found == "venv" else "CONDA_PREFIX"] = str(shell.vllm)
    shell.environment = environment
    status, output, errors = shell.run("launch.sh")
    assert status == 0 and errors == ""
    first = output.splitlines()[0]
    assert first.startswith("Engine: vllm") and str(shell.vllm) in first
    assert [row["state"] for row in shell.status()] == ["healthy"]


def test_without_vllm_the_transformers_engine_serves_and_says_so(shell, monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "REPOSITORY", tmp_path)
    settings = LaunchSettings.from_environment(shell.environment)
    engine = engines.choose_engine(settings, {"PATH": str(shell.bin)}, ())
    assert engine.name == "transformers" and "no vLLM" in engine.note
    with pytest.raises(LaunchError, match="VLLM_PYTHON"):
        engines.choose_engine(settings, {"VLLM_PYTHON": sys.executable}, ())


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (None, "4"),  # 28 heads: not 8
        pytest.param(
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}},
            "8",
            marks=pytest.mark.slow,
            id="heads left to the defaults of the class",
        ),
    ],
)
def test_gpus_are_used_together(shell, model, config, size):
    if config:
        (model / "config.json").write_text(json.dumps(config))
    shell.install_gpus(8)
    del shell.environment["CUDA_VISIBLE_DEVICES"]
    output = shell.launch(GPU_MEMORY_UTILIZATION="0.5")
    assert ("GPUs 4,5,6,7 stay unused" in output) == (size == "4")
    words = shell.records()[0]["argv"]
    assert option(words, "--tensor-parallel-size") == size
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
        ({"VLLM_API_KEY": "a\nb"}, "VLLM_API_KEY"),
        ({"VLLM_API_KEY": "key\n"}, "VLLM_API_KEY"),
        ({"VLLM_GATEWAY": "never"}, "VLLM_GATEWAY"),
        ({"VLLM_MEDIA_HOSTS": "http://a.example/"}, "VLLM_MEDIA_HOSTS"),
        ({"VLLM_MEDIA_HOSTS": "a.example", "VLLM_ENGINE": "transformers"}, "VLLM_MEDIA_HOSTS"),
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


NUMBERS = (
    *("VLLM_PORT", "VLLM_TP", "VLLM_REPLICAS", "VLLM_START_TIMEOUT", "GPU_MEMORY_UTILIZATION", "MAX_MODEL_LEN"),
    *("VLLM_MAX_IMAGES", "VLLM_GATEWAY_WORKERS", "VLLM_MAX_CONCURRENT", "VLLM_MAX_BODY_MB", "VLLM_REQUEST_TIMEOUT"),
)


@pytest.mark.parametrize("value", ["nan", "-nan", "1e999", "-inf", "9" * 5000, "1" + "0" * 5000 + ".5", "-1", "0x10", "①"])
def test_odd_numbers_are_refused_in_one_short_sentence(value):
    for variable in NUMBERS:
        with pytest.raises(LaunchError, match=variable) as error:
            LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "model", variable: value})
        assert len(str(error.value)) < 150 and "\n" not in str(error.value)


def test_an_error_is_one_line_on_the_command_line(shell):
    errors = shell.failed_launch(VLLM_PORT="http")
    assert errors.startswith("launch: VLLM_PORT") and errors.count("\n") == 1


def test_a_lora_adapter_is_not_a_model(shell, model):
    (model / "config.json").rename(model / "adapter_config.json")
    assert "LoRA adapter" in shell.failed_launch()


def test_a_port_in_use_is_refused(shell):
    with socket.create_server(("127.0.0.1", shell.port)):
        errors = shell.failed_launch()
    assert "VLLM_PORT" in errors and f"pid {os.getpid()} " in errors


def test_of_two_launches_on_one_port_only_one_is_ready(shell):
    """vLLM lets both listen, and the kernel divides the requests between their weights."""
    launches = [shell.start("launch.sh", VLLM_LABEL=label) for label in ("one", "two")]
    ends = [(*launch.communicate(timeout=200), launch.returncode) for launch in launches]
    (errors,) = [errors for _, errors, status in ends if status == 1]
    assert sorted(status for *_, status in ends) == [0, 1] and [("Ready:" in out) for out, *_ in ends].count(True) == 1
    assert str(shell.port) in errors and "label" in errors and errors.count("\n") == 1
    (row,) = shell.status()
    assert row["state"] == "healthy"
    shell.stop(VLLM_LABEL=row["label"])


def test_a_launch_is_not_ready_because_another_server_answers(shell):
    """The other takes the port while the model loads, and serves the same name."""
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.fake_pids()
    words = ["--served-model-name", "Judge", "--host", "127.0.0.1", "--port", str(shell.port)]
    other = subprocess.Popen([sys.executable, FAKE, *words])
    try:
        _, errors = launch.communicate(timeout=60)
        assert launch.returncode == 1 and f"port {shell.port}" in errors and f"pid {other.pid} " in errors
        assert errors.count("\n") == 1
        all_ended(pids)
    finally:
        other.kill()
        other.wait()


def test_a_label_in_use_is_refused_and_that_of_a_dead_launch_is_replaced(shell):
    shell.launch()
    assert "label 'test' is in use" in shell.failed_launch(VLLM_PORT=str(free_port()))
    (row,) = shell.status()
    for pid in shell.fake_pids():
        os.kill(pid, signal.SIGKILL)
    all_ended([row["pid"]])
    assert shell.status()[0]["state"] == "ended"
    shell.launch()


def test_after_the_launcher_was_killed_its_servers_are_known_and_the_label_is_usable_again(shell):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    pids = shell.fake_pids()
    wait_for(shell.state_file().exists)
    os.killpg(launch.pid, signal.SIGKILL)
    launch.communicate(timeout=60)
    assert "VLLM_LABEL=test bash vllm_server/stop.sh" in shell.failed_launch()
    assert [row["state"] for row in shell.status()] == ["loading"]
    shell.stop()
    all_ended(pids)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_launch_leaves_no_process(shell, number):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs, stubborn" if number == signal.SIGINT else "hangs")
    pids = shell.fake_pids()
    os.killpg(launch.pid, number)
    _, errors = launch.communicate(timeout=60)
    assert launch.returncode == 130 and "nothing is left running" in errors
    all_ended(pids)
    assert shell.status() == []


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


@pytest.mark.slow
def test_weights_that_lack_a_tensor_are_refused_before_vllm_starts(shell, judge_folder, tmp_path):
    output = shell.launch()
    assert "Weights of Judge not checked: config.json names no architectures" in output
    shell.stop()
    shutil.rmtree(shell.environment["FAKE_VLLM_RECORD"])
    assert "not checked" not in shell.launch(VLLM_MODEL_PATHS=str(judge_folder))
    shell.stop()
    shutil.rmtree(shell.environment["FAKE_VLLM_RECORD"])
    folder = shutil.copytree(judge_folder, tmp_path / "judge")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]  # vLLM fuses it with q_proj and v_proj
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    errors = shell.failed_launch(VLLM_MODEL_PATHS=str(folder))
    assert "lack 1 of the model's tensors: model.language_model.layers.0.self_attn.k_proj" in errors
    assert errors.count("\n") == 1 and not Path(shell.environment["FAKE_VLLM_RECORD"]).exists()


def test_a_damaged_state_is_reported_and_hides_no_other_label(shell):
    shell.launch(VLLM_LABEL="other")
    state = shell.state_file()
    state.parent.mkdir(parents=True)
    for damage in ("{", "[]", '{"label": "test", "ready": true, "servers": [{"leader": null}]}', "\udcff"):
        state.write_text(damage, errors="surrogateescape")
        for script in ("launch.sh", "stop.sh", "status.sh"):
            status, output, errors = shell.run(script)
            assert status == 1 and str(state) in errors and errors.count("\n") == 1
        assert "other" in output and "healthy" in output
        assert [row["label"] for row in shell.status()] == ["other"]
    state.unlink()


def test_state_outlives_a_login(tmp_path):
    """XDG_RUNTIME_DIR vanishes at logout, old files vanish from /tmp; servers go on."""
    login = {"XDG_RUNTIME_DIR": str(tmp_path / "login"), "HOME": str(tmp_path / "home")}
    root = runtime_root(login)
    assert root.parent == tmp_path / "home" / ".local" / "state" / "paco-rl" and root.stat().st_mode & 0o777 == 0o700
    assert runtime_root(login | {"XDG_STATE_HOME": str(tmp_path / "state")}).parent == tmp_path / "state" / "paco-rl"
    assert runtime_root(login | {"PACO_RUNTIME_DIR": str(tmp_path / "own")}) == tmp_path / "own"
    assert not (tmp_path / "login").exists()


@pytest.mark.slow
def test_the_transformers_engine_is_launched(shell, judge_folder, tiny):
    assert "Engine: transformers" in shell.launch(VLLM_MODEL_PATHS=str(judge_folder), VLLM_ENGINE="transformers")
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1), "Do the two images show the same? Yes or No") for i in range(8)]
    verdicts = JudgeClient(shell.url, model="judge", deadline_s=120).score_blocking(pairs)
    assert all(verdict.ok or "neither Yes nor No" in verdict.error for verdict in verdicts)
    pid = shell.status()[0]["pid"]
    shell.stop()
    all_ended([pid])
