"""Several servers in one launch: models, replicas, adapters, a key; with stand-ins for vLLM behind the real gateway."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from gateway_tools import LOCAL
from safetensors.numpy import save_file
from serving_tools import all_ended, free_port, wait_for

from vllm_server.processes import Process


def url_of(shell) -> str:
    return f"http://127.0.0.1:{shell.port}"


def ask(shell, model: str, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return LOCAL.post(f"{url_of(shell)}/v1/chat/completions", json={"model": model}, headers=headers)


def pids_of(shell) -> list[int]:
    """Every process of the launch, as the state knows them."""
    state = json.loads((Path(shell.environment["PACO_RUNTIME_DIR"]) / "test" / "state.json").read_text())
    return [member["pid"] for server in state["servers"] for member in server["members"]]


def running(shell) -> set[int]:
    """Every process that the launch started, whether or not it has come so far as to record itself."""
    mark = shell.environment["PACO_RUNTIME_DIR"].encode()

    def ours(process: Path) -> bool:
        try:
            return mark in (process / "environ").read_bytes()
        except OSError:
            return False

    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and ours(path)}


@pytest.fixture
def two(shell, model) -> dict:
    """Variables of a launch with two models."""
    shutil.copytree(model, model.parent / "second")
    return {"VLLM_MODEL_PATHS": "model,second", "VLLM_MODEL_NAMES": "Judge,Other"}


@pytest.mark.slow
def test_several_models_behind_one_port(shell, two):
    status, output, errors = shell.run("launch.sh", **two)
    assert status == 0, errors
    assert "Gateway in front" in output and f"Ready:  Judge, Other at {url_of(shell)}/v1" in output
    assert [row["id"] for row in LOCAL.get(f"{url_of(shell)}/v1/models").json()["data"]] == ["Judge", "Other"]
    for name in ("Judge", "Other"):
        assert ask(shell, name).json()["choices"][0]["message"]["content"] == name
    assert ask(shell, "Third").status_code == 404
    rows = shell.status()
    assert [(row["name"], row["engine"], row["state"]) for row in rows] == [
        ("gateway", "gateway", "healthy"), ("Judge", "vllm", "healthy"), ("Other", "vllm", "healthy")
    ]  # fmt: skip
    ports = [record["port"] for record in shell.records(2)]
    assert len({*ports, shell.port}) == 3 and all(20000 <= port < 32768 for port in ports)
    assert all("127.0.0.1" in record["argv"] for record in shell.records(2))
    pids = pids_of(shell)
    assert len(pids) >= 5, "gateway, two servers, and a child of each server"
    assert shell.run("stop.sh")[0] == 0 and all_ended(pids)
    assert "Nothing runs" in shell.run("stop.sh")[1]


def test_replicas_one_of_which_dies(shell):
    status, _, errors = shell.run("launch.sh", VLLM_REPLICAS="2")
    assert status == 0, errors
    assert [row["name"] for row in shell.status()] == ["gateway", "Judge", "Judge-2"]
    said = {ask(shell, "Judge").json()["port"] for _ in range(4)}
    assert said == {record["port"] for record in shell.records(2)}, "both are asked"
    os.kill(shell.records(2)[0]["pids"][0], signal.SIGKILL)
    assert {ask(shell, "Judge").status_code for _ in range(8)} == {200}
    assert [row["state"] for row in shell.status()].count("ended") == 1
    assert shell.run("stop.sh")[0] == 0
    assert all_ended([pid for record in shell.records(2) for pid in record["pids"]])


def test_a_key_puts_the_gateway_in_front_of_one_model(shell):
    status, output, errors = shell.run("launch.sh", VLLM_API_KEY="geheim", VLLM_HOST="0.0.0.0")
    assert status == 0, errors
    assert ask(shell, "Judge").status_code == 401 and ask(shell, "Judge", "geheim").status_code == 200
    assert LOCAL.get(f"{url_of(shell)}/metrics").status_code == 401
    assert LOCAL.get(f"{url_of(shell)}/health").status_code == 200
    record = shell.record()
    assert record["argv"][record["argv"].index("--host") + 1] == "127.0.0.1", "the engine is not reached from outside"
    assert record["env"]["VLLM_API_KEY"] == "geheim"
    assert [row["state"] for row in json.loads(shell.run("status.sh", "--json", VLLM_API_KEY="geheim")[1])] == [
        "healthy"
    ] * 2
    assert shell.status()[0]["state"] == "not answering", "who lacks the key cannot tell"
    state = Path(shell.environment["PACO_RUNTIME_DIR"]) / "test"
    written = "".join(path.read_text() for path in state.iterdir() if path.is_file())
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids_of(shell)]
    assert "geheim" not in output + written + "".join(commands)


def test_a_server_that_dies_takes_the_whole_launch_with_it(shell, two):
    status, _, errors = shell.run("launch.sh", FAKE_VLLM="Other dies", **two)
    assert status == 1 and "the server of Other ended with status 1" in errors and "no room for the key" in errors
    assert "Judge" not in errors and "Traceback" not in errors
    wait_for(lambda: not running(shell), timeout_s=10)
    assert shell.status() == []


def test_each_model_has_its_own_time(shell, two):
    status, _, errors = shell.run("launch.sh", FAKE_VLLM="Other hangs", VLLM_START_TIMEOUT="200,2", **two)
    assert status == 1 and "the server of Other did not answer within 2 s" in errors
    wait_for(lambda: not running(shell), timeout_s=10)


def test_ctrl_c_while_several_load_leaves_no_process(shell, two):
    launch = shell.start("launch.sh", FAKE_VLLM="hangs", VLLM_REPLICAS="2", **two)
    records = shell.records(4)
    assert len(running(shell)) >= 10, "launch, gateway, four servers and their children"
    os.killpg(launch.pid, signal.SIGINT)
    _, errors = launch.communicate(timeout=60)
    assert launch.returncode == 130 and "nothing is left running" in errors
    assert all_ended([pid for record in records for pid in record["pids"]])
    assert not running(shell)


@pytest.mark.slow
def test_two_groups_beside_each_other(shell, two, tmp_path):
    other = {"VLLM_PORT": str(free_port()), "VLLM_LABEL": "other", "FAKE_VLLM_RECORD": str(tmp_path / "other")}
    assert shell.run("launch.sh", **two)[0] == 0
    assert shell.run("launch.sh", **two, **other)[0] == 0
    assert shell.run("stop.sh")[0] == 0
    assert [(row["label"], row["state"]) for row in shell.status()] == [("other", "healthy")] * 3
    assert LOCAL.get(f"http://127.0.0.1:{other['VLLM_PORT']}/health").status_code == 200


@pytest.mark.slow
def test_in_the_foreground_replicas_may_end_until_none_is_left(shell):
    launch = shell.start("launch.sh", "--foreground", VLLM_REPLICAS="2")
    read_until(launch, "Ready:")
    records, pids = shell.records(2), pids_of(shell)
    os.kill(records[0]["pids"][0], signal.SIGKILL)
    assert "the other replicas serve on" in read_until(launch, "ended with status -9")
    assert ask(shell, "Judge").status_code == 200
    os.kill(records[1]["pids"][0], signal.SIGKILL)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL and all_ended(pids) and shell.status() == []


def read_until(process: subprocess.Popen, start: str) -> str:
    return next(line for line in process.stdout if start in line)


def test_gpus_are_divided(shell, two):
    shell.install_gpus(4)
    assert shell.run("launch.sh", CUDA_VISIBLE_DEVICES="3,2,1,0", VLLM_TP="1", VLLM_REPLICAS="2,1", **two)[0] == 0
    placed = [(record["name"], record["env"]["CUDA_VISIBLE_DEVICES"]) for record in shell.records(3)]
    assert sorted(placed) == [("Judge", "2"), ("Judge", "3"), ("Other", "1")]


def test_adapters_are_served_on_their_base(shell, two, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 12, "base_model_name_or_path": "/elsewhere/second"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a.language_model.lora_A.weight": np.zeros((12, 4), np.float32)}, adapter / "adapter_model.safetensors")
    status, output, errors = shell.run("launch.sh", VLLM_LORA="tuned=adapter", **two)
    assert status == 0, errors
    assert "tuned (LoRA) from" in output and ask(shell, "tuned").json()["served"] == ["Other", "tuned"]
    (given,) = [record["argv"] for record in shell.records(2) if record["name"] == "Other"]
    assert given[given.index("--lora-modules") + 1] == f"tuned={adapter}"
    assert given[given.index("--max-lora-rank") + 1] == "16" and "--enable-lora" in given
    (plain,) = [record["argv"] for record in shell.records(2) if record["name"] == "Judge"]
    assert "--enable-lora" not in plain


def test_it_can_be_launched_again_after_a_crash(shell, two):
    """Everything is killed behind the launcher's back, the gateway too; the label is free again."""
    assert shell.run("launch.sh", **two)[0] == 0
    pids = pids_of(shell)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(Process.of(pid) for pid in pids))
    assert {row["state"] for row in shell.status()} == {"ended"}
    assert shell.run("launch.sh", **two)[0] == 0
