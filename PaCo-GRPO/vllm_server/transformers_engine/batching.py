"""One worker thread runs the model; whatever is queued when it is free becomes the next batch."""

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_server.transformers_engine.model import JudgeModel, Prepared
from vllm_server.transformers_engine.protocol import ChatRequest, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """One answer token with the log-probabilities that were asked for."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Job:
    """A request in the engine. Tokens arrive on ``tokens``: a list each time, then None; or an exception."""

    request: ChatRequest
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0
    finish_reason: str = "length"
    cancelled: bool = False


class Batcher:
    """Collects jobs from one event loop and runs them in batches on its own thread.

    ``max_batch``: requests in one forward; ``max_batch_tokens``: padded tokens in one forward (default 2048 on a CPU,
    where more falls out of its caches and is slower a pair; 32768 on a GPU); ``max_waiting``: jobs
    beyond which new ones are refused with 429. Between the tokens of long answers, waiting one-token questions are
    answered, so that reasons do not hold up scores.
    """

    def __init__(
        self, model: JudgeModel, max_batch: int = 64, max_batch_tokens: int | None = None, max_waiting: int = 4096
    ):
        self._model = model
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._max_batch_tokens = max_batch_tokens or (2048 if model.device.type == "cpu" else 32768)
        self._scores: deque[Job] = deque()
        self._answers: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Let the batch under way end, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job; its tokens arrive on ``job.tokens``. Raises RequestError(429) when the queue is full."""
        with self._wake:
            if len(self._scores) + len(self._answers) >= self._max_waiting:
                raise RequestError(f"{self._max_waiting} requests are waiting already; try again later", status=429)
            (self._scores if job.request.max_tokens == 1 else self._answers).append(job)
            self._wake.notify()

    # Everything below runs on the worker thread.

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._scores or self._answers or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
            self._run_scores()
            self._run_answers()

    def _take(self, queue: deque[Job]) -> list[Job]:
        with self._wake:
            jobs = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
        return [job for job in jobs if not job.cancelled]

    def _run_scores(self) -> None:
        jobs = self._take(self._scores)
        if jobs:
            self._guarded(jobs, self._score)

    def _run_answers(self) -> None:
        jobs = self._take(self._answers)
        if jobs:
            self._guarded(jobs, self._answer)

    def _guarded(self, jobs: list[Job], run) -> None:
        """A batch that goes wrong (out of memory, say) is an error of its requests, not the end of the server."""
        try:
            run(jobs)
        except Exception as error:
            logger.exception("a batch of %d requests failed", len(jobs))
            self._deliver([(job, error) for job in jobs])

    def _score(self, jobs: list[Job]) -> None:
        for group, prepared in self._groups(jobs):
            logprobs = self._model.first_token_logprobs(prepared)
            tokens = self._tokens(group, logprobs, logprobs.argmax(-1).tolist())
            for job, token in zip(group, tokens, strict=True):
                job.finish_reason = "stop" if token.id in self._model.eos_ids else "length"
            self._deliver([(job, [token], None) for job, token in zip(group, tokens, strict=True)])

    def _answer(self, jobs: list[Job]) -> None:
        for group, prepared in self._groups(jobs):
            self._generate(group, prepared)

    def _generate(self, jobs: list[Job], prepared: list[Prepared]) -> None:
        model = self._model
        limits = [
            min(job.request.max_tokens or model.max_model_len, model.max_model_len - len(row))
            for job, row in zip(jobs, prepared, strict=True)
        ]
        positions = torch.tensor([row.prompt.next_position for row in prepared], device=model.device)
        logprobs, cache, mask = model.prefill(prepared)
        open_rows = set(range(len(jobs)))
        step = 0
        while True:
            step += 1
            chosen = logprobs.argmax(-1)
            tokens = self._tokens(jobs, logprobs, chosen.tolist())
            self._deliver(self._step(jobs, tokens, limits, step, open_rows))
            if not open_rows:
                return
            self._run_scores()
            mask = torch.cat([mask, mask.new_ones((len(jobs), 1))], dim=1)
            logprobs = model.decode(chosen, positions + (step - 1), cache, mask)

    def _step(self, jobs: list[Job], tokens: list[Token], limits: list[int], step: int, open_rows: set[int]) -> list:
        """What to deliver after one step; rows that have ended are taken out of ``open_rows``."""
        deliveries = []
        for row in sorted(open_rows):
            job, token = jobs[row], tokens[row]
            ended = token.id in self._model.eos_ids
            last = ended or step >= limits[row] or job.cancelled or self._stopping
            if last:
                job.finish_reason = "stop" if ended else "length"
                open_rows.discard(row)
            deliveries.append((job, [token], None) if last else (job, [token]))
        return deliveries

    def _groups(self, jobs: list[Job]):
        """Prepare jobs, deliver those that cannot be, and cut the others by padded size."""
        prepared = self._model.prepare([job.request for job in jobs])
        refused = [(job, row) for job, row in zip(jobs, prepared, strict=True) if isinstance(row, RequestError)]
        if refused:
            self._deliver(refused)
        group: list[Job] = []
        rows: list[Prepared] = []
        longest = 0
        for job, row in zip(jobs, prepared, strict=True):
            if isinstance(row, RequestError):
                continue
            job.prompt_tokens = len(row)
            if rows and max(longest, len(row)) * (len(rows) + 1) > self._max_batch_tokens:
                yield group, rows
                group, rows, longest = [], [], 0
            group.append(job)
            rows.append(row)
            longest = max(longest, len(row))
        if rows:
            yield group, rows

    def _tokens(self, jobs: list[Job], logprobs: torch.Tensor, chosen: list[int]) -> list[Token]:
        most = max(job.request.top_logprobs or 0 for job in jobs)
        values, ids = (part.tolist() for part in logprobs.topk(max(most, 1), dim=-1))
        own = logprobs[range(len(jobs)), chosen].tolist()
        return [
            Token(
                chosen[row], own[row], tuple(zip(ids[row], values[row], strict=True))[: job.request.top_logprobs or 0]
            )
            for row, job in enumerate(jobs)
        ]

    def _deliver(self, deliveries: list[tuple]) -> None:
        """One wake-up of the event loop for a whole batch."""

        def put():
            for job, *parts in deliveries:
                for part in parts:
                    job.tokens.put_nowait(part)

        self._loop.call_soon_threadsafe(put)
