"""Several servers in one launch: models, replicas, adapters, a key; fake vLLMs behind the real gateway."""

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from gateway_tools import LOCAL, health
from safetensors.numpy import save_file
from serving_tools import all_ended, free_port, option, read_until, wait_for

from vllm_server.processes import Process, port_users, session_members


def ask(shell, model: str, key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return LOCAL.post(f"{shell.url}/v1/chat/completions", json={"model": model}, headers=headers)


@pytest.fixture
def two(shell, model) -> dict:
    """Variables of a launch with two models."""
    shutil.copytree(model, model.parent / "second")
    return {"VLLM_MODEL_PATHS": "model,second", "VLLM_MODEL_NAMES": "Judge,Other"}


@pytest.mark.slow
def test_two_models_behind_one_port_in_two_launches(shell, two, tmp_path):
    output = shell.launch(**two)
    assert "Gateway in front" in output and f"Ready:  Judge, Other at {shell.url}/v1" in output
    assert [row["id"] for row in LOCAL.get(f"{shell.url}/v1/models").json()["data"]] == ["Judge", "Other"]
    for name in ("Judge", "Other"):
        assert ask(shell, name).json()["choices"][0]["message"]["content"] == name
    assert ask(shell, "Third").status_code == 404
    assert [(row["name"], row["engine"], row["state"]) for row in shell.status()] == [
        ("gateway", "gateway", "healthy"), ("Judge", "vllm", "healthy"), ("Other", "vllm", "healthy")
    ]  # fmt: skip
    records, pids = shell.records(2), shell.pids()
    ports = [record["port"] for record in records]
    assert len({*ports, shell.port}) == 3 and all(20000 <= port < 32768 for port in ports)
    assert len(pids) >= 5, "gateway, two servers, and a child of each server"
    other = {"VLLM_PORT": str(free_port()), "VLLM_LABEL": "other", "FAKE_VLLM_RECORD": str(tmp_path / "other")}
    shell.launch(**two, **other)
    shell.stop()
    all_ended(pids)
    assert [(row["label"], row["state"]) for row in shell.status()] == [("other", "healthy")] * 3
    assert LOCAL.get(f"http://127.0.0.1:{other['VLLM_PORT']}/health").status_code == 200


def test_one_of_two_replicas_dies(shell):
    shell.launch(VLLM_REPLICAS="2")
    assert [row["name"] for row in shell.status()] == ["gateway", "Judge", "Judge-2"]
    records = shell.records(2)
    asked = {ask(shell, "Judge").json()["port"] for _ in range(4)}
    assert asked == {record["port"] for record in records}, "both are asked"
    os.kill(records[0]["pids"][0], signal.SIGKILL)
    assert {ask(shell, "Judge").status_code for _ in range(8)} == {200}
    assert [row["state"] for row in shell.status()].count("ended") == 1
    shell.stop()
    all_ended(shell.fake_pids(2))


def test_a_key_puts_the_gateway_in_front_of_one_model(shell):
    output = shell.launch(VLLM_API_KEY="geheim", VLLM_HOST="0.0.0.0")
    assert ask(shell, "Judge").status_code == 401 and ask(shell, "Judge", "geheim").status_code == 200
    assert LOCAL.get(f"{shell.url}/health").status_code == 200
    (record,) = shell.records()
    assert option(record["argv"], "--host") == "127.0.0.1", "the engine is not reachable from outside"
    assert record["env"]["VLLM_API_KEY"] == "geheim"
    assert [row["state"] for row in shell.status(VLLM_API_KEY="geheim")] == ["healthy"] * 2
    assert shell.status()[0]["state"] == "not answering", "without the key nobody can tell"
    written = "".join(path.read_text() for path in shell.state_file().parent.iterdir() if path.is_file())
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in shell.pids()]
    assert "geheim" not in output + written + "".join(commands)


@pytest.mark.slow
@pytest.mark.parametrize("supervisor", ["runs", "was killed"])
def test_stop_ends_gateway_workers_that_were_started_after_the_launch(shell, supervisor):
    shell.launch(VLLM_GATEWAY="always", VLLM_GATEWAY_WORKERS="2")
    leader = shell.status()[0]["pid"]
    launched = set(session_members(Process.of(leader)))
    for member in launched:
        if member.pid != leader and "spawn_main" in Path(f"/proc/{member.pid}/cmdline").read_text():
            os.kill(member.pid, signal.SIGKILL)

    def later() -> list[Process]:
        return [member for member in session_members(Process.of(leader)) if member not in launched]

    wait_for(lambda: len(later()) == 2 and health(shell.url) == 200)
    workers = later()
    if supervisor == "was killed":
        os.kill(leader, signal.SIGKILL)
        all_ended([worker.pid for worker in workers])  # by themselves: nobody would know them any more
    shell.stop()
    all_ended([worker.pid for worker in workers])
    assert port_users("127.0.0.1", shell.port) == (False, None)


@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        ({"FAKE_VLLM": "Other dies"}, "the server of Other ended with status 1"),
        (
            {"FAKE_VLLM": "Other hangs", "VLLM_REPLICAS": "1,2", "VLLM_START_TIMEOUT": "200,2"},
            "the server of Other did not answer within 2 s",
        ),
    ],
)
def test_a_server_that_fails_ends_the_whole_launch(shell, two, variables, reported):
    errors = shell.failed_launch(**two, **variables)
    assert reported in errors and "Judge" not in errors
    wait_for(lambda: not shell.running(), timeout_s=10)
    assert shell.status() == []


@pytest.mark.slow
def test_a_foreground_launch_ends_with_its_last_replica(shell):
    launch = shell.launch_in_foreground(VLLM_REPLICAS="2")
    records, pids = shell.records(2), shell.pids()
    os.kill(records[0]["pids"][0], signal.SIGKILL)
    assert "the other replicas serve on" in read_until(launch, "ended with status -9")
    assert ask(shell, "Judge").status_code == 200
    os.kill(records[1]["pids"][0], signal.SIGKILL)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL and shell.status() == []
    all_ended(pids)


def test_gpus_are_divided(shell, two):
    shell.install_gpus(4)
    shell.launch(CUDA_VISIBLE_DEVICES="3,2,1,0", VLLM_TP="1", VLLM_REPLICAS="2,1", **two)
    placed = [(record["name"], record["env"]["CUDA_VISIBLE_DEVICES"]) for record in shell.records(3)]
    assert sorted(placed) == [("Judge", "2"), ("Judge", "3"), ("Other", "1")]


def test_copies_of_one_model_run_inside_one_vllm(shell):
    shell.install_gpus(4)
    assert "GPU 0,1,2,3, 2 copies" in shell.launch(CUDA_VISIBLE_DEVICES="0,1,2,3", VLLM_TP="2", VLLM_REPLICAS="2")
    words = shell.records()[0]["argv"]
    assert option(words, "--tensor-parallel-size") == option(words, "--data-parallel-size") == "2"
    assert [row["name"] for row in shell.status()] == ["Judge"]


def test_adapters_are_served_on_their_base(shell, two, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 12, "base_model_name_or_path": "/elsewhere/second"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def save(part: str) -> None:
        weights = {f"a.{part}.lora_A.weight": np.zeros((12, 4), np.float32)}
        save_file(weights, adapter / "adapter_model.safetensors")

    save("visual")
    assert "tuned changes the vision tower" in shell.failed_launch(VLLM_LORA="tuned=adapter", **two)
    save("language_model")
    assert "tuned (LoRA) from" in shell.launch(VLLM_LORA="tuned=adapter", **two)
    assert ask(shell, "tuned").json()["served"] == ["Other", "tuned"]
    words = {record["name"]: record["argv"] for record in shell.records(2)}
    assert option(words["Other"], "--lora-modules") == f"tuned={adapter}"
    assert option(words["Other"], "--max-lora-rank") == "16"
    assert "--enable-lora" not in words["Judge"]
