"""launch.sh, stop.sh and status.sh as a user types them: on a fake vLLM, and on real engines."""

import os
import signal
import subprocess
import time

import httpx
import numpy as np
import psutil
import pytest
from fakes import free_port
from serving_tools import VLLM_PYTHON, body, top_logprobs

from paco_judge.client import JudgeClient
from paco_judge.identity import identity
from vllm_server.servers import Server, read_servers


def test_launch_status_stop(shell):
    """In an activated environment, which the launcher finds by itself."""
    for name in ("PYTHON", "VLLM_PYTHON"):
        del shell.environment[name]
    shell.environment |= {
        "PATH": f"{shell.vllm}/bin:/usr/bin:/bin",
        "CONDA_PREFIX": str(shell.vllm),
    }
    output = shell.launch()
    assert output.startswith("Engine: vllm")
    assert str(shell.vllm) in output
    assert f"Ready:  Judge at {shell.url}/v1" in output
    status, output, _ = shell.run("status.sh")
    label, name, *_, state, _ = output.split()
    assert (status, label, name, state) == (0, "test", "Judge", "healthy")
    (server,) = read_servers(shell.folder)
    os.kill(server.pid, signal.SIGKILL)  # its child outlives it, and may hold a GPU's memory
    (child,) = shell.processes(True) - {server.pid}
    assert f"pid {child}" in shell.failed_launch()
    os.kill(child, signal.SIGKILL)
    shell.processes(False)
    status, output, _ = shell.run("status.sh")
    assert status == 3
    assert "ended" in output
    shell.launch()  # the label of a dead launch is replaced
    assert shell.run("stop.sh")[0] == 0
    shell.processes(False)
    assert shell.states() == []


def test_of_two_launches_on_one_port_only_one_is_ready(shell):
    """vLLM lets both listen, and the kernel divides the requests between their weights."""
    launches = [shell.start("launch.sh", VLLM_LABEL=label) for label in ("one", "two")]
    ends = [(launch.communicate(), launch.returncode) for launch in launches]
    assert sorted(status for _, status in ends) == [0, 1]
    for (output, errors), status in ends:
        assert ("Ready:" in output) == (status == 0)
        assert (str(shell.port) in errors) == (status == 1)
    (state,) = shell.states()
    assert state[1:] == ("Judge", "healthy")


def test_a_launch_that_fails_or_is_interrupted_leaves_no_process(shell, two):
    assert "VLLM_START_TIMEOUT" in shell.failed_launch(FAKE_VLLM="hangs", VLLM_START_TIMEOUT="2")
    assert "no kernel image" in shell.failed_launch(FAKE_VLLM="breaks")
    errors = shell.failed_launch(**two, FAKE_VLLM="Other")
    assert "no room for the key-value cache" in errors  # the end of its log
    shell.processes(False)
    launch = shell.start("launch.sh", FAKE_VLLM="hangs")
    while not read_servers(shell.folder):  # written when the launch knows the process
        assert launch.poll() is None
        time.sleep(0.05)
    os.killpg(launch.pid, signal.SIGTERM)
    launch.communicate()
    assert launch.returncode == 130
    shell.processes(False)
    assert shell.states() == []


def test_two_models_behind_one_port_with_a_key_next_to_another_launch(shell, two):
    output = shell.launch(**two, VLLM_API_KEY="geheim", VLLM_HOST="0.0.0.0")
    assert f"Ready:  Judge, Other at {shell.url}/v1" in output

    names = ("gateway", "Judge", "Other")
    assert shell.states("geheim") == [("test", name, "healthy") for name in names]
    assert shell.states()[0][2] == "other key"
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in shell.processes(True)]
    files = [path.read_text() for path in shell.folder.iterdir()]
    assert "geheim" not in output + "".join(commands + files)  # others can read them
    shell.launch(VLLM_PORT=str(free_port()), VLLM_LABEL="other", VLLM_API_KEY="k")
    shell.run("stop.sh")
    others = [("other", "gateway", "healthy"), ("other", "Judge", "healthy")]
    assert shell.states("k") == others


def test_stop_signals_nothing_but_what_it_started():
    """A pid may have been given to another process since."""
    innocent = subprocess.Popen(["sleep", "60"], start_new_session=True)
    server = Server("J", "http://127.0.0.1:1", "vllm", ["J"], [], [], "", innocent.pid, 100.0)
    assert not server.end(1.0)
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


@pytest.mark.long
@pytest.mark.timeout(1000)  # a busy machine takes ten minutes to import vLLM
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_real_vllm_gives_the_scores_of_transformers(shell, judge_folder, scorer, pairs, scores):
    real = {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_START_TIMEOUT": "800"}
    assert "Engine: vllm" in shell.launch(VLLM_MODEL_PATHS=str(judge_folder), **real)
    client = JudgeClient(shell.url, model="judge", deadline_s=300)
    assert client.identity() == identity(judge_folder), "and it says whose scores they are"
    verdicts = client.score(pairs)  # at once
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx(scores, abs=1e-4)
    url = f"{shell.url}/v1/chat/completions"
    listed = httpx.get(f"{shell.url}/v1/models", timeout=60, trust_env=False).json()
    assert listed["data"][0]["identity"] == client.identity(), "also to other machines"
    for pair in pairs[:4]:
        answer = httpx.post(url, json=body(pair), timeout=300, trust_env=False)
        (logits,) = scorer.first_token_logits([scorer.chat(pair)]).astype(float)
        logprobs = np.sort(logits - np.logaddexp.reduce(logits))[::-1]
        top = sorted((entry["logprob"] for entry in top_logprobs(answer)), reverse=True)
        assert top[:20] == pytest.approx(logprobs[:20], abs=1e-3)
