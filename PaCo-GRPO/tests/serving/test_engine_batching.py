"""The engine's batches: what overlaps, what is bounded, and what a failure costs."""

import threading
from unittest import mock

import pytest
import torch
from engine_tools import ids, pair_requests, run

from paco_grpo.asgi import ApiError
from vllm_server.transformers_engine.batching import Batcher, Job


@pytest.fixture
def scores(tiny):
    return [row[2] for row in pair_requests(tiny, 12, max_tokens=1)]


async def test_the_next_batch_is_prepared_while_the_model_runs(judge, scores):
    forward, prepare = judge.first_token_logprobs, judge.prepare
    second_prepared, prepared = threading.Event(), []

    def counting(requests):
        rows = prepare(requests)
        prepared.append(len(requests))
        if len(prepared) == 2:
            second_prepared.set()
        return rows

    def waiting(batch):
        assert second_prepared.wait(60), "the forward blocked the preparation"
        return forward(batch)

    with mock.patch.object(judge, "prepare", counting), mock.patch.object(judge, "first_token_logprobs", waiting):
        answers = await run(judge, scores[:4], max_batch=2)
    assert all(len(tokens) == 1 for tokens, _ in answers)


async def test_batches_respect_their_limits(judge, scores):
    forward, sizes = judge.first_token_logprobs, []
    length = max(map(len, judge.prepare(scores)))
    watched = mock.patch.object(judge, "first_token_logprobs", lambda batch: sizes.append(len(batch)) or forward(batch))
    with watched:
        expected = [ids(answer) for answer in await run(judge, scores)]
        assert max(sizes) > 3
        for limits in ({"max_batch": 3}, {"max_batch_tokens": 3 * length}):
            sizes.clear()
            assert [ids(answer) for answer in await run(judge, scores, **limits)] == expected
            assert max(sizes) == 3
        sizes.clear()
        await run(judge, scores, max_batch_tokens=1)
        assert sizes == [1] * len(scores), "a request larger than the limit runs alone"


async def test_scores_run_between_the_tokens_of_long_answers(judge, tiny, scores):
    decode, forward, calls = judge.decode, judge.first_token_logprobs, []
    decoding = mock.patch.object(judge, "decode", lambda *given: calls.append("step") or decode(*given))
    scoring = mock.patch.object(judge, "first_token_logprobs", lambda batch: calls.append("score") or forward(batch))
    long = pair_requests(tiny, 1, max_tokens=9)[0][2]
    with decoding, scoring, mock.patch.object(judge, "eos_ids", frozenset()):
        await run(judge, [long, *scores], max_batch=2)
    assert calls.count("step") == 8
    assert "step score" in " ".join(calls) and "score step" in " ".join(calls)


@pytest.mark.parametrize(
    ("method", "tokens"), [("prepare", 1), ("first_token_logprobs", 1), ("prefill", 3), ("decode", 3)]
)
async def test_a_failure_is_an_error_of_its_request_only(judge, tiny, method, tokens):
    requests = [row[2] for row in pair_requests(tiny, 3, max_tokens=tokens)]
    good, length = getattr(judge, method), len(judge.prepare(requests[:1])[0])

    def failing(batch, *rest):
        first = (lambda each: each == requests[0]) if method == "prepare" else (lambda each: len(each) == length)
        if method == "decode" or any(map(first, batch)):
            raise RuntimeError("out of memory in /secret/place")
        return good(batch, *rest)

    with mock.patch.object(judge, "eos_ids", frozenset()):
        batcher = Batcher(judge)
        batcher.start()
        for attempt in range(2):
            jobs = [Job(each) for each in requests]
            fault = mock.patch.object(judge, method, good if attempt else failing)
            with fault:
                for job in jobs:
                    batcher.submit(job)
                for number, job in enumerate(jobs):
                    if attempt or (number and method != "decode"):  # in the middle of answers nothing is repeated
                        assert len([token async for token in job]) == tokens
                    else:
                        with pytest.raises(ApiError) as error:
                            [token async for token in job]
                        assert error.value.status == 500 and "secret" not in str(error.value)
            assert batcher.alive()
        await batcher.stop()
    assert not batcher.alive()


async def test_log_probabilities_that_are_no_numbers_are_an_error_of_their_request(judge, scores):
    forward = judge.first_token_logprobs

    def damaged(batch):
        logprobs = forward(batch)
        logprobs[0] = torch.nan
        return logprobs

    with mock.patch.object(judge, "first_token_logprobs", damaged):
        batcher = Batcher(judge)
        jobs = [Job(each) for each in scores[:2]]
        for job in jobs:
            batcher.submit(job)
        batcher.start()
        with pytest.raises(ApiError, match="not numbers") as error:
            [token async for token in jobs[0]]
        assert error.value.status == 422, "clients do not ask again"
        assert len([token async for token in jobs[1]]) == 1
        await batcher.stop()


async def test_a_cancelled_request_costs_no_forward(judge, scores):
    forward, rows = judge.first_token_logprobs, []
    with mock.patch.object(judge, "first_token_logprobs", lambda batch: rows.append(len(batch)) or forward(batch)):
        await run(judge, scores[:2], cancelled=[0])
    assert rows == [1]


async def test_a_full_queue_refuses(judge, scores):
    batcher = Batcher(judge, max_waiting=1)
    batcher.submit(Job(scores[0]))
    with pytest.raises(ApiError) as refused:
        batcher.submit(Job(scores[1]))
    assert refused.value.status == 429 and refused.value.retry_after_s == 1
