"""Batching across requests: those that wait while one batch runs become the next batch."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from paco_grpo.asgi import ApiError
from vllm_server.transformers_engine.model import JudgeModel, Prepared
from vllm_server.transformers_engine.protocol import ChatRequest

logger = logging.getLogger(__name__)

_LOWEST = -9999.0  # stands for minus infinity, which is no JSON; vLLM's value


@dataclass(frozen=True)
class Token:
    """One answer token with the log-probabilities that were asked for."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Job:
    """A request in the engine. ``tokens`` receives each token, then None; or an exception."""

    request: ChatRequest
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)
    prepared: Prepared | None = None
    finish_reason: str = "length"
    cancelled: bool = False
    began: bool = False  # a token was delivered

    def drop_inputs(self) -> None:
        """Frees texts and images, which nobody needs any more."""
        self.request = replace(self.request, turns=(), images=())

    def cancel(self) -> None:
        """The caller has left: nothing more is computed for this request."""
        self.cancelled = True
        self.drop_inputs()

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yields the tokens as they come. Raises ApiError."""
        while (item := await self.tokens.get()) is not None:
            if isinstance(item, ApiError):
                raise item
            if isinstance(item, Exception):
                raise ApiError("the engine failed on this request; its log says why", 500) from item
            yield item


class Batcher:
    """Runs requests in batches on two threads.

    One thread prepares requests (decodes and encodes images, tokenizes prompts), the other runs the language model, so
    that the next batch is prepared during a forward. Scores (one-token requests) and longer answers are batched
    separately and share both threads. Each step of a long answer is one call on the model's thread, so that scores run
    between its tokens. All other state is used on the event loop only.

    Args:
        max_batch: Requests in one forward; about as many are kept prepared.
        max_batch_tokens: Padded tokens in one forward. Default: 2048 on a CPU, where larger batches fall out of its
            caches and run slower per pair; 32768 on a GPU.
        max_waiting: Waiting requests beyond which new ones are refused with 429.
    """

    def __init__(
        self, model: JudgeModel, max_batch: int = 64, max_batch_tokens: int | None = None, max_waiting: int = 4096
    ):
        self._model = model
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._max_batch_tokens = max_batch_tokens or (2048 if model.device.type == "cpu" else 32768)
        self._scores, self._answers = asyncio.Queue(), asyncio.Queue()
        self._tasks: list[asyncio.Task] = []
        self._prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-prepare")
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-model")

    def start(self) -> None:
        """Starts serving on the running event loop."""
        for incoming, run in ((self._scores, self._score), (self._answers, self._generate)):
            ready = asyncio.Queue(self._max_batch)  # bounded: prepared requests hold image features
            for work in (self._prepare(incoming, ready), self._run(ready, run)):
                self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """Ends the tasks and, after the calls in flight, the threads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for thread in (self._prepare_thread, self._model_thread):
            await asyncio.to_thread(thread.shutdown)

    def alive(self) -> bool:
        """False when a task has ended: requests would wait forever."""
        return not any(task.done() for task in self._tasks)

    def submit(self, job: Job) -> None:
        """Queues a job. Raises ApiError (429) when too many are waiting."""
        if self._scores.qsize() + self._answers.qsize() >= self._max_waiting:
            raise ApiError(f"{self._max_waiting} requests are waiting; try again later", 429, retry_after_s=1)
        (self._scores if job.request.max_tokens == 1 else self._answers).put_nowait(job)

    async def _prepare(self, incoming: asyncio.Queue[Job], ready: asyncio.Queue[Job]) -> None:
        while True:
            jobs = [await incoming.get()]
            while len(jobs) < self._max_batch and not incoming.empty():
                jobs.append(incoming.get_nowait())
                if jobs[-1].cancelled:
                    jobs.pop()
            await _together_or_alone(jobs, self._prepare_batch)
            for job in jobs:
                job.drop_inputs()
                if job.prepared:
                    await ready.put(job)

    async def _prepare_batch(self, jobs: list[Job]) -> None:
        rows = await _on(self._prepare_thread, self._model.prepare, [job.request for job in jobs])
        for job, row in zip(jobs, rows, strict=True):
            if isinstance(row, ApiError):
                job.tokens.put_nowait(row)
            else:
                job.prepared = row

    async def _run(self, ready: asyncio.Queue[Job], run: Callable[[list[Job]], Awaitable[None]]) -> None:
        async for batch in self._batches(ready):
            await _together_or_alone(batch, run)

    async def _batches(self, ready: asyncio.Queue[Job]) -> AsyncIterator[list[Job]]:
        """Yields jobs for one forward each: of one adapter, and as many as fit."""
        job = None
        while True:
            batch, job = [job or await ready.get()], None
            longest = len(batch[0].prepared)
            while len(batch) < self._max_batch and not ready.empty():
                job = ready.get_nowait()
                longest = max(longest, len(job.prepared))
                other_adapter = job.prepared.adapter != batch[0].prepared.adapter
                if other_adapter or longest * (len(batch) + 1) > self._max_batch_tokens:
                    break  # it begins the next batch
                batch.append(job)
                job = None
            yield batch

    async def _score(self, jobs: list[Job]) -> None:
        for job, token in zip(jobs, await _on(self._model_thread, self._first_tokens, jobs), strict=True):
            self._deliver(job, token, last=True)

    async def _generate(self, jobs: list[Job]) -> None:
        longest = self._model.max_model_len
        left = {i: min(job.request.max_tokens or longest, longest - len(job.prepared)) for i, job in enumerate(jobs)}
        steps = self._steps(jobs)
        while left:
            tokens = await _on(self._model_thread, next, steps)
            for i in list(left):
                left[i] -= 1
                if self._deliver(jobs[i], tokens[i], left[i] <= 0 or jobs[i].cancelled):
                    del left[i]

    def _deliver(self, job: Job, token: Token, last: bool) -> bool:
        """Hands out a token; whether the answer ends with it."""
        job.began = True
        if not math.isfinite(token.logprob):
            job.tokens.put_nowait(_not_a_number())
            return True
        job.tokens.put_nowait(token)
        stop = token.id in self._model.eos_ids
        if last or stop:
            job.finish_reason = "stop" if stop else "length"
            job.tokens.put_nowait(None)
        return last or stop

    # On the model's thread.

    @torch.inference_mode()
    def _first_tokens(self, jobs: list[Job]) -> list[Token]:
        return _tokens(jobs, self._model.first_token_logprobs([job.prepared for job in jobs]))

    @torch.inference_mode()
    def _steps(self, jobs: list[Job]) -> Iterator[list[Token]]:
        """Yields every job's next token, endlessly."""
        rows = [job.prepared for job in jobs]
        positions = torch.tensor([row.prompt.next_position for row in rows], device=self._model.device)
        logprobs, cache, mask = self._model.prefill(rows)
        while True:
            yield _tokens(jobs, logprobs)
            mask = torch.cat([mask, mask.new_ones((len(jobs), 1))], dim=1)
            logprobs = self._model.decode(logprobs.argmax(-1), positions, cache, mask, rows[0].adapter)
            positions = positions + 1


def _tokens(jobs: list[Job], logprobs: torch.Tensor) -> list[Token]:
    """The likeliest token of each row of log-probabilities (B, V), with as many others as its request asks for."""
    wanted = [job.request.top_logprobs or 0 for job in jobs]
    chosen = logprobs.argmax(-1)
    own = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.clamp(min=_LOWEST).topk(max(1, *wanted), dim=-1))
    return [
        Token(token, own[i], tuple(zip(ids[i][: wanted[i]], values[i][: wanted[i]], strict=True)))
        for i, token in enumerate(chosen.tolist())
    ]


async def _on(thread: ThreadPoolExecutor, function: Callable, *arguments):
    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def _not_a_number() -> ApiError:
    # No 5xx: asking again, as clients then do, would not help.
    return ApiError("the model's log-probabilities are not numbers: its weights are damaged", 422, code="not_a_number")


async def _together_or_alone(jobs: list[Job], work: Callable[[list[Job]], Awaitable[None]]) -> None:
    """Runs ``work`` on the jobs whose callers wait; if it fails, on each alone: one request costs others nothing.

    A job that fails alone, or in the middle of its answer, gets the error.
    """
    jobs = [job for job in jobs if not job.cancelled]
    try:
        if jobs:
            await work(jobs)
    except Exception as error:
        logger.exception("a batch of %d requests failed", len(jobs))
        for job in jobs:
            if job.began or len(jobs) == 1:
                job.tokens.put_nowait(error)
            else:
                await _together_or_alone([job], work)
