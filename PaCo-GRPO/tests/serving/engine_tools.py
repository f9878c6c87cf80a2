"""Requests for the transformers engine in tests, and the numbers that transformers itself gives."""

import asyncio
import json
from collections.abc import Sequence

import orjson
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from paco_judge.images import data_url
from paco_judge.questions import build_messages, theme_question
from vllm_server.transformers_engine.batching import Batcher, Job
from vllm_server.transformers_engine.protocol import ChatRequest, parse_request


def parse(served: tuple[str, ...] = ("m",), adapters: Sequence[str] = (), **fields) -> ChatRequest:
    return parse_request(orjson.dumps({"model": "m"} | fields), served, adapters)


def request(*images: Image.Image, question: str = "same?", **fields) -> ChatRequest:
    return parse(messages=build_messages(*map(data_url, images), question), **fields)


def pair_requests(tiny, count: int, **fields) -> list[tuple[list, str, ChatRequest]]:
    """(images, question, request) of different lengths; some share images."""
    pictures = [tiny.picture(seed, size=28 + 9 * seed) for seed in range(4)]
    rows = []
    for index in range(count):
        images = [pictures[index % 4], pictures[(index + 1 + index // 4) % 4]]
        question = theme_question("a fox" + " and a boat" * (index % 3))
        rows.append((images, question, request(*images, question=question, **fields)))
    return rows


def plain_model(folder):
    """The model as transformers loads it; the engine skips computation that its answers do not need."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def plain_inputs(processor, images, question):
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, enable_thinking=False)
    return processor(images=list(images), text=[text], return_tensors="pt")


def plain_logprobs(model, processor, images, question) -> torch.Tensor:
    """(V,): of the first answer token."""
    with torch.inference_mode():
        return torch.log_softmax(model(**plain_inputs(processor, images, question)).logits[0, -1].float(), -1)


async def run(judge, requests: Sequence[ChatRequest], cancelled: Sequence[int] = (), **settings) -> list[tuple]:
    """Queues all requests at once; (tokens, finish reason) of each, None for those cancelled."""
    batcher = Batcher(judge, **settings)
    jobs = [Job(each, cancelled=index in cancelled) for index, each in enumerate(requests)]
    for job in jobs:
        batcher.submit(job)
    batcher.start()

    async def answer(job: Job) -> tuple | None:
        return None if job.cancelled else ([token async for token in job], job.finish_reason)

    try:
        return await asyncio.wait_for(asyncio.gather(*map(answer, jobs)), 120)
    finally:
        await batcher.stop()


def ids(answer: tuple) -> list[int]:
    return [token.id for token in answer[0]]


def chat_body(tiny, **fields) -> dict:
    urls = [data_url(tiny.picture(seed)) for seed in (0, 1)]
    body = {"model": "Tiny-Judge", "messages": build_messages(*urls, "same?"), "temperature": 0} | fields
    return json.loads(json.dumps(body))
