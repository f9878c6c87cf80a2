"""A launched gateway with a key in front of a real engine, asked by the clients that people use."""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
from PIL import Image
from serving_tools import REPO, VLLM_PYTHON, Shell, all_ended, free_port

from paco_judge.client import JudgeClient, Pair
from paco_judge.questions import build_messages, theme_question

TOY_JUDGE = REPO / "quickstart" / "models" / "judge"
KEY = "sk-clients"


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(noise).resize((56, 56), Image.Resampling.NEAREST)


def messages(seed: int = 1) -> list[dict]:
    urls = []
    for image in (picture(seed), picture(seed + 1)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return build_messages(*urls, theme_question("a red star"))


def first_tokens(client: openai.OpenAI, model: str) -> list[dict[str, float]]:
    """The first token's 20 likeliest, for four pairs of pictures; what every score is read from."""
    answers = [
        client.chat.completions.create(
            model=model, messages=messages(seed), max_tokens=1, temperature=0, logprobs=True, top_logprobs=20
        )
        for seed in range(4)
    ]
    return [{top.token: top.logprob for top in a.choices[0].logprobs.content[0].top_logprobs} for a in answers]


def engine_url(shell: Shell) -> str:
    """The private address of the first engine."""
    return next(row["url"] for row in json.loads(shell.run("status.sh", "--json")[1]) if row["engine"] != "gateway")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("served"), VLLM_MODEL_PATHS=str(TOY_JUDGE), VLLM_MODEL_NAMES="Toy-Judge")
    shell.environment |= {"VLLM_ENGINE": "transformers", "VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    status, _, errors = shell.run("launch.sh")
    assert status == 0, errors
    yield shell
    assert shell.run("stop.sh")[0] == 0


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY, max_retries=0)


@pytest.mark.slow
def test_the_openai_client(served, client):
    assert [model.id for model in client.models.list()] == ["Toy-Judge"]
    answer = client.chat.completions.create(
        model="Toy-Judge", messages=messages(), max_tokens=1, temperature=0, logprobs=True, top_logprobs=20
    )
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 20
    whole = client.chat.completions.create(model="Toy-Judge", messages=messages(), max_tokens=8, temperature=0)
    parts = client.chat.completions.create(
        model="Toy-Judge", messages=messages(), max_tokens=8, temperature=0, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="served: Toy-Judge"):
        client.chat.completions.create(model="Other", messages=messages())
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="Toy-Judge", messages=messages(), temperature=0.7)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.slow
def test_curl(served):
    request = {"model": "Toy-Judge", "messages": messages(), "max_tokens": 3, "temperature": 0, "stream": True}
    url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
    command = ["curl", "-sSN", "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, "-d", "@-", url], input=json.dumps(request), capture_output=True, text=True, timeout=60, check=True
    )
    events = [line for line in done.stdout.splitlines() if line]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"


@pytest.mark.slow
def test_the_judges_client_and_its_scores(served, client):
    direct = openai.OpenAI(base_url=f"{engine_url(served)}/v1", api_key=KEY)
    assert first_tokens(client, "Toy-Judge") == first_tokens(direct, "Toy-Judge")
    pairs = [Pair(picture(i), picture(i + 1), theme_question("a red star")) for i in range(4)]
    judge = JudgeClient(f"http://127.0.0.1:{served.port}", model="toy-judge", api_key=KEY)
    assert all(verdict.ok for verdict in judge.score_blocking(pairs))


@pytest.mark.slow
def test_schemathesis_finds_nothing_against_our_openapi_page(served, tmp_path):
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += [f"http://127.0.0.1:{served.port}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
    command += ["--max-examples", "15", "--seed", "1", "--generation-deterministic", "--no-color"]
    # What of a request beyond `model` is acceptable is the engine's to say, and its page's.
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "60"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: 4" in done.stdout, "all four routes"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_real_vllm_behind_the_gateway(tmp_path):
    """Two models (the toy judge twice), a key; the scores are the engine's own, and stop ends everything."""
    shell = Shell(tmp_path, VLLM_MODEL_PATHS=f"{TOY_JUDGE},{TOY_JUDGE}", VLLM_MODEL_NAMES="One,Two", VLLM_API_KEY=KEY)
    shell.environment |= {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_ENGINE": "vllm", "VLLM_PORT": str(free_port())}
    shell.environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_START_TIMEOUT": "1500", "OMP_NUM_THREADS": "1"}
    try:
        status, _, errors = shell.run("launch.sh", timeout=1700)
        assert status == 0, errors
        rows = json.loads(shell.run("status.sh", "--json")[1])
        assert [row["state"] for row in rows] == ["healthy"] * 3
        front = openai.OpenAI(base_url=f"http://127.0.0.1:{shell.environment['VLLM_PORT']}/v1", api_key=KEY)
        direct = first_tokens(openai.OpenAI(base_url=f"{engine_url(shell)}/v1", api_key=KEY), "One")
        for name in ("One", "Two"):
            for ours, theirs in zip(first_tokens(front, name), direct, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)
        stream = front.chat.completions.create(model="Two", messages=messages(), max_tokens=4, stream=True)
        assert len(list(stream)) > 2
    finally:
        pids = [row["pid"] for row in json.loads(shell.run("status.sh", "--json")[1])]
        assert shell.run("stop.sh")[0] == 0
    assert all_ended(pids)
