"""The engine's numbers against a plain forward of the model, one request at a time."""

import asyncio
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from paco_judge.images import png_data_url
from paco_judge.questions import build_messages, theme_question
from vllm_server.transformers_engine.batching import Batcher, Job
from vllm_server.transformers_engine.model import JudgeModel, LruCache, _chunks
from vllm_server.transformers_engine.protocol import RequestError, parse_request


@pytest.fixture(scope="module")
def judge(judge_folder):
    return JudgeModel.load(str(judge_folder), max_model_len=1024)


@pytest.fixture(scope="module")
def plain(judge_folder):
    """The model as transformers loads it: the engine leaves out what its answers do not need."""
    return AutoModelForImageTextToText.from_pretrained(judge_folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def request(messages, **more):
    return parse_request({"model": "m", "messages": messages, "temperature": 0, **more}, ("m",))


def pair_requests(tiny, count, **more):
    """Requests of different length, some of which share images; with what a plain forward needs."""
    pictures = [tiny.picture(seed, size=28 + 9 * seed) for seed in range(4)]
    rows = []
    for index in range(count):
        images = [pictures[index % 4], pictures[(index + 1 + index // 4) % 4]]
        question = theme_question("a fox" + " and a boat" * (index % 3))
        rows.append((images, question, request(build_messages(*map(png_data_url, images), question), **more)))
    return rows


def plain_inputs(judge, images, question):
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]
    text = judge.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return judge.processor(images=images, text=[text], return_tensors="pt")


def plain_logits(judge, plain, images, question) -> torch.Tensor:
    return plain(**plain_inputs(judge, images, question)).logits[0, -1].float()


def test_a_padded_batch_gives_the_scores_of_a_plain_forward(judge, plain, tiny):
    rows = pair_requests(tiny, 7, max_tokens=1)
    batch = judge.prepare([row[2] for row in rows])
    assert len({len(row) for row in batch}) > 1, "the batch is padded"
    together = judge.first_token_logprobs(batch)
    for index, (images, question, _) in enumerate(rows):
        logits = plain_logits(judge, plain, images, question).double().numpy()
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        np.testing.assert_allclose(together[index].numpy(), expected, atol=2e-4)
        alone = judge.first_token_logprobs(judge.prepare([rows[index][2]]))
        torch.testing.assert_close(alone[0], together[index], atol=2e-4, rtol=0)


def test_each_image_passes_the_vision_tower_once(judge_folder, tiny):
    judge = JudgeModel.load(str(judge_folder), max_model_len=1024)
    tower = judge.model.model.get_image_features
    seen = []
    with mock.patch.object(
        judge.model.model, "get_image_features", lambda pixels, grids: seen.append(len(grids)) or tower(pixels, grids)
    ):
        requests = [row[2] for row in pair_requests(tiny, 6)]
        judge.prepare(requests)
        assert seen == [4], "four different images, one pass"
        judge.prepare(requests)
        assert seen == [4]


def test_messages_without_images_and_with_a_system_text(judge, plain):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a paper boat"}]
    (row,) = judge.prepare([request(turns, max_tokens=1)])
    text = judge.processor.apply_chat_template(turns, add_generation_prompt=True)
    logits = plain(**judge.processor(text=[text], return_tensors="pt")).logits[0, -1]
    torch.testing.assert_close(
        judge.first_token_logprobs([row])[0], torch.log_softmax(logits.float(), -1), atol=2e-4, rtol=0
    )


def test_bad_requests_are_errors_of_their_own(judge, tiny):
    good = pair_requests(tiny, 1)[0][2]
    url = png_data_url(tiny.picture(0))
    broken = request(build_messages(url, url[: url.index(",") + 1 + 160], "q"))  # half a file
    not_base64 = request(build_messages(url, "data:image/png;base64,a?b", "q"))
    injected = request(build_messages(url, url, "<|image_pad|>"))
    long = request(build_messages(url, url, "words " * 2000))
    results = judge.prepare([broken, good, not_base64, injected, long])
    assert [isinstance(row, RequestError) for row in results] == [True, False, True, True, True]
    assert "cannot be read" in str(results[0])
    assert "base64" in str(results[2])
    assert "image places" in str(results[3])
    assert "the model takes 1024 together" in str(results[4])


async def _answers(judge, requests) -> list[tuple[list[int], str]]:
    batcher = Batcher(judge)
    batcher.start(asyncio.get_running_loop())
    try:
        jobs = [Job(each) for each in requests]
        for job in jobs:
            batcher.submit(job)
        results = []
        for job in jobs:
            ids = []
            while (part := await asyncio.wait_for(job.tokens.get(), 120)) is not None:
                if isinstance(part, Exception):
                    raise part
                ids += [token.id for token in part]
            results.append((ids, job.finish_reason))
        return results
    finally:
        await asyncio.to_thread(batcher.stop)


async def test_longer_answers_are_those_of_generate(judge, plain, tiny):
    rows = pair_requests(tiny, 4, max_tokens=9)
    scores = pair_requests(tiny, 3, max_tokens=1)
    answers = await _answers(judge, [row[2] for row in rows + scores])
    for (images, question, _), (ids, reason) in zip(rows, answers, strict=False):
        inputs = plain_inputs(judge, images, question)
        expected = plain.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert ids == expected.tolist()
        assert reason == ("stop" if ids[-1] in judge.eos_ids else "length")
    assert all(len(ids) == 1 for ids, _ in answers[4:])


async def test_a_forward_that_fails_is_an_error_of_its_requests_only(judge, tiny):
    rows = [row[2] for row in pair_requests(tiny, 2, max_tokens=1)]
    broken = mock.patch.object(judge, "first_token_logprobs", side_effect=RuntimeError("out of memory"))
    with broken, pytest.raises(RuntimeError, match="out of memory"):
        await _answers(judge, rows)
    assert len(await _answers(judge, rows)) == 2


def test_a_full_queue_refuses(judge, tiny):
    batcher = Batcher(judge, max_waiting=1)
    row = pair_requests(tiny, 1)[0][2]

    async def fill():
        batcher.submit(Job(row))
        with pytest.raises(RequestError, match="1 requests are waiting") as refused:
            batcher.submit(Job(row))
        assert refused.value.status == 429

    asyncio.run(fill())


def test_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match=r"'gpt2' model; the transformers engine serves qwen2_5_vl"):
        JudgeModel.load(str(tmp_path), 1024)


def test_the_cache_keeps_within_its_weight():
    cache = LruCache(10)
    for key in "abc":
        cache.put(key, key.upper(), weight=4)
    assert [cache.get(key) for key in "abc"] == [None, "B", "C"]
    cache.put("d", "D", weight=99)
    assert [cache.get(key) for key in "abcd"] == [None, None, None, "D"]


def test_chunks_hold_at_most_their_limit():
    assert _chunks([3, 3, 3], 6) == [2, 3]
    assert _chunks([9, 1, 1], 6) == [1, 3]
    assert _chunks([1], 6) == [1]
