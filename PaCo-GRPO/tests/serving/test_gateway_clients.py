"""A launched gateway with a key in front of a real engine, asked by the clients that people use."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openai
import pytest
from PIL import Image
from serving_tools import REPO, VLLM_PYTHON, Shell, all_ended

from paco_judge.client import JudgeClient, Pair
from paco_judge.images import data_url
from paco_judge.questions import build_messages, theme_question

TOY_JUDGE = REPO / "quickstart" / "models" / "judge"
KEY = "sk-clients"


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(noise).resize((56, 56), Image.Resampling.NEAREST)


def messages(seed: int = 1) -> list[dict]:
    urls = (data_url(picture(seed)), data_url(picture(seed + 1)))
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


def engine_client(shell: Shell) -> openai.OpenAI:
    """A client of the first engine, on its private port."""
    url = next(row["url"] for row in shell.status() if row["engine"] != "gateway")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)


def fetches_nothing(client: openai.OpenAI) -> None:
    """No image that the caller does not send is read, from whatever host or file."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    good = data_url(picture(1))
    for url in (
        f"http://127.0.0.1:{port}/a.png", f"http://localhost:{port}/a.png", f"HTTP://127.0.0.1:{port}/a.png",
        f"http://no@127.0.0.1:{port}/a.png", f"http://[::ffff:127.0.0.1]:{port}/a.png", "https://no/remote/media",
        f"http://no/remote/media@127.0.0.1:{port}/", f"file://{TOY_JUDGE}/config.json", "file:///etc/passwd",
    ):  # fmt: skip
        with pytest.raises(openai.APIStatusError):  # vLLM answers 400 for other hosts and 500 for files
            client.with_options(max_retries=0).chat.completions.create(model="One", messages=build_messages(good, url, "same?"), max_tokens=1)
    server.shutdown()
    server.server_close()
    assert not asked


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("served"), VLLM_MODEL_PATHS=str(TOY_JUDGE), VLLM_MODEL_NAMES="Toy-Judge")
    shell.environment |= {"VLLM_ENGINE": "transformers", "VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    shell.launch()
    yield shell
    shell.stop()


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.slow
def test_scores_are_those_of_the_engine(served, client):
    assert first_tokens(client, "Toy-Judge") == first_tokens(engine_client(served), "Toy-Judge")
    pairs = [Pair(picture(i), picture(i + 1), theme_question("a red star")) for i in range(4)]
    judge = JudgeClient(served.url, model="toy-judge", api_key=KEY)
    assert all(verdict.ok for verdict in judge.score_blocking(pairs))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_real_vllm_gives_the_scores_of_transformers(served, client, tmp_path):
    """Two models (the toy judge twice) behind the gateway, a key; stop ends everything."""
    shell = Shell(tmp_path, VLLM_MODEL_PATHS=f"{TOY_JUDGE},{TOY_JUDGE}", VLLM_MODEL_NAMES="One,Two", VLLM_API_KEY=KEY)
    shell.environment |= {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_ENGINE": "vllm"}
    shell.environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_START_TIMEOUT": "1500", "OMP_NUM_THREADS": "1"}
    try:
        shell.launch(timeout=1700)
        assert [row["state"] for row in shell.status()] == ["healthy"] * 3
        front = openai.OpenAI(base_url=f"{shell.url}/v1", api_key=KEY)
        direct, ours = first_tokens(engine_client(shell), "One"), first_tokens(client, "Toy-Judge")
        for name in ("One", "Two"):
            for found, same, other in zip(first_tokens(front, name), direct, ours, strict=True):
                assert found == pytest.approx(same, abs=1e-3)
                shared = found.keys() & other.keys()
                assert len(shared) >= 15
                assert [found[token] for token in shared] == pytest.approx([other[token] for token in shared], abs=2e-2)
        stream = front.chat.completions.create(model="Two", messages=messages(), max_tokens=4, stream=True)
        assert len(list(stream)) > 2
        fetches_nothing(front)
    finally:
        pids = [row["pid"] for row in shell.status()]
        shell.stop()
    all_ended(pids)
