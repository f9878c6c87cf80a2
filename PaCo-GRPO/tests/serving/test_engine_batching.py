"""What the engine's two threads do beside each other."""

import asyncio
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from paco_judge.images import png_data_url
from paco_judge.questions import build_messages
from vllm_server.transformers_engine import model as model_module
from vllm_server.transformers_engine.batching import Batcher, Job
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.protocol import RequestError, parse_request


@pytest.fixture
def judge(judge_folder):
    return JudgeModel.load(str(judge_folder), max_model_len=1024)


def photograph(seed: int) -> Image.Image:
    """Noise: a PNG of about 300 kB."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (320, 320, 3), dtype=np.uint8))


def request(*images: Image.Image, **more):
    messages = build_messages(*map(png_data_url, images), "same?")
    return parse_request({"model": "m", "messages": messages, "max_tokens": 1, **more}, ("m",))


async def run(judge, jobs, **settings) -> list[list]:
    batcher = Batcher(judge, **settings)
    batcher.start(asyncio.get_running_loop())
    try:
        for job in jobs:
            batcher.submit(job)
        return [await asyncio.wait_for(job.tokens.get(), 120) for job in jobs]
    finally:
        await asyncio.to_thread(batcher.stop)


async def test_the_next_batch_is_prepared_while_the_model_runs(judge, tiny):
    forward, prepare = judge.first_token_logprobs, judge.prepare
    second_prepared = threading.Event()
    prepared = []

    def counting(requests):
        rows = prepare(requests)
        prepared.append(len(requests))
        if len(prepared) == 2:
            second_prepared.set()
        return rows

    def waiting(batch):
        assert second_prepared.wait(60), "the forward held up the preparation"
        return forward(batch)

    jobs = [Job(request(tiny.picture(seed), tiny.picture(seed + 1))) for seed in range(4)]
    with mock.patch.object(judge, "prepare", counting), mock.patch.object(judge, "first_token_logprobs", waiting):
        answers = await run(judge, jobs, max_batch=2)
    assert all(len(tokens) == 1 for tokens in answers)


async def test_no_more_is_prepared_ahead_than_a_batch(judge, tiny):
    """What is prepared holds image features: a long queue must not fill the memory with them."""
    forward = judge.first_token_logprobs
    ahead = []
    jobs = [Job(request(tiny.picture(seed), tiny.picture(seed + 1))) for seed in range(12)]
    batcher = Batcher(judge, max_batch=2)

    def watching(batch):
        ahead.append(len(batcher._scores.ready))
        return forward(batch)

    with mock.patch.object(judge, "first_token_logprobs", watching):
        batcher.start(asyncio.get_running_loop())
        for job in jobs:
            batcher.submit(job)
        for job in jobs:
            assert len(await asyncio.wait_for(job.tokens.get(), 120)) == 1
        await asyncio.to_thread(batcher.stop)
    assert max(ahead) < 4


async def test_a_preparation_that_fails_is_an_error_of_its_requests_only(judge, tiny):
    jobs = [Job(request(tiny.picture(1), tiny.picture(2)))]
    with mock.patch.object(judge, "prepare", side_effect=RuntimeError("no memory for images")):
        (error,) = await run(judge, jobs)
    assert isinstance(error, RuntimeError)
    (tokens,) = await run(judge, [Job(jobs[0].request)])
    assert len(tokens) == 1


async def test_a_cancelled_request_costs_no_forward(judge, tiny):
    jobs = [Job(request(tiny.picture(seed), tiny.picture(seed + 1))) for seed in range(2)]
    jobs[0].cancelled = True
    rows = []
    forward = judge.first_token_logprobs
    batcher = Batcher(judge)
    with mock.patch.object(judge, "first_token_logprobs", lambda batch: rows.append(len(batch)) or forward(batch)):
        for job in jobs:
            batcher.submit(job)
        batcher.start(asyncio.get_running_loop())
        assert len(await asyncio.wait_for(jobs[1].tokens.get(), 120)) == 1
        await asyncio.to_thread(batcher.stop)
    assert rows == [1]


def test_large_images_are_decoded_on_threads_with_the_same_result(judge_folder, monkeypatch):
    images = [photograph(seed) for seed in range(3)]
    requests = [request(images[0], images[1]), request(images[1], images[2])]
    url = requests[0].images[0]
    broken = parse_request({"model": "m", "messages": build_messages(url, url[: len(url) // 8 * 4], "same?")}, ("m",))
    names: set[str] = set()
    open_url = model_module._open_url

    def noting(url):
        names.add(threading.current_thread().name)
        return open_url(url)

    monkeypatch.setattr(model_module, "_open_url", noting)
    found = []
    for limit in (model_module._INLINE_BYTES, 1 << 40):
        monkeypatch.setattr(model_module, "_INLINE_BYTES", limit)
        with torch.inference_mode():
            found.append(JudgeModel.load(str(judge_folder), 1024).prepare([*requests, broken]))
    threaded, inline = found
    assert any(name.startswith("engine-decode") for name in names) and "MainThread" in names
    for a, b in zip(threaded[:2], inline[:2], strict=True):
        for one, other in zip(a.features, b.features, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert isinstance(threaded[2], RequestError) and isinstance(inline[2], RequestError)
