"""Two threads serve the requests: one prepares them, one runs the model; what is queued becomes the next batch."""

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


@dataclass
class Lane:
    """Jobs of one kind: as they came, and prepared for the forward."""

    incoming: deque[Job] = field(default_factory=deque)
    ready: deque[tuple[Job, Prepared]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.incoming) + len(self.ready)


class Batcher:
    """Collects jobs from one event loop and runs them in batches on threads of its own.

    The next batch is prepared (images decoded and passed through the vision tower, prompts tokenised) while the
    language model runs the one before it. ``max_batch``: requests in one forward, and those that are kept prepared;
    ``max_batch_tokens``: padded tokens in one forward (default 2048 on a CPU, where more falls out of its caches and
    is slower a pair; 32768 on a GPU); ``max_waiting``: jobs beyond which new ones are refused with 429. Between the
    tokens of long answers, waiting one-token questions are answered, so that reasons do not hold up scores.
    """

    def __init__(
        self, model: JudgeModel, max_batch: int = 64, max_batch_tokens: int | None = None, max_waiting: int = 4096
    ):
        self._model = model
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self._max_batch_tokens = max_batch_tokens or (2048 if model.device.type == "cpu" else 32768)
        self._scores, self._answers = Lane(), Lane()
        self._lock = threading.Lock()
        self._may_prepare, self._may_run = threading.Condition(self._lock), threading.Condition(self._lock)
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = [
            threading.Thread(target=self._prepare, name="engine-prepare", daemon=True),
            threading.Thread(target=self._work, name="engine-forward", daemon=True),
        ]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the batches under way end, then end the threads."""
        with self._lock:
            self._stopping = True
            self._may_prepare.notify()
            self._may_run.notify()
        for thread in self._threads:
            thread.join()

    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, job: Job) -> None:
        """Queue a job; its tokens arrive on ``job.tokens``. Raises RequestError(429) when the queue is full."""
        with self._lock:
            if len(self._scores) + len(self._answers) >= self._max_waiting:
                raise RequestError(f"{self._max_waiting} requests are waiting already; try again later", status=429)
            (self._scores if job.request.max_tokens == 1 else self._answers).incoming.append(job)
            self._may_prepare.notify()

    # On the preparing thread.

    @torch.inference_mode()
    def _prepare(self) -> None:
        while True:
            with self._lock:
                while not (self._stopping or (lane := self._lane_to_prepare())):
                    self._may_prepare.wait()
                if self._stopping:
                    return
                jobs = [lane.incoming.popleft() for _ in range(min(len(lane.incoming), self._max_batch))]
            jobs = [job for job in jobs if not job.cancelled]
            self._guarded(jobs, lambda jobs, lane=lane: self._prepare_batch(jobs, lane))

    def _lane_to_prepare(self) -> Lane | None:
        """Scores first; no further ahead than a batch, for what is prepared takes memory."""
        for lane in (self._scores, self._answers):
            if lane.incoming and len(lane.ready) < self._max_batch:
                return lane
        return None

    def _prepare_batch(self, jobs: list[Job], lane: Lane) -> None:
        prepared = list(zip(jobs, self._model.prepare([job.request for job in jobs]), strict=True))
        refused = [(job, row) for job, row in prepared if isinstance(row, RequestError)]
        if refused:
            self._deliver(refused)
        for job, row in prepared:
            if not isinstance(row, RequestError):
                job.prompt_tokens = len(row)
        with self._lock:
            lane.ready.extend((job, row) for job, row in prepared if not isinstance(row, RequestError))
            self._may_run.notify()

    # On the forward thread.

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._scores.ready or self._answers.ready or self._stopping):
                    self._may_run.wait()
                if self._stopping:
                    return
            self._run_scores()
            jobs, prepared = self._take(self._answers)
            self._guarded(jobs, lambda jobs, prepared=prepared: self._generate(jobs, prepared))

    def _take(self, lane: Lane) -> tuple[list[Job], list[Prepared]]:
        """The next rows for one forward: of one adapter, as many as fit."""
        jobs: list[Job] = []
        rows: list[Prepared] = []
        longest = 0
        with self._lock:
            while lane.ready and len(rows) < self._max_batch:
                job, row = lane.ready[0]
                longest = max(longest, len(row))
                if rows and (row.adapter != rows[0].adapter or longest * (len(rows) + 1) > self._max_batch_tokens):
                    break
                lane.ready.popleft()
                if not job.cancelled:
                    jobs.append(job)
                    rows.append(row)
            self._may_prepare.notify()
        return jobs, rows

    def _run_scores(self) -> None:
        """Answer the one-token questions that are ready, one batch at most, so that answers get their turn."""
        left = self._max_batch
        while left > 0 and self._scores.ready and not self._stopping:
            jobs, prepared = self._take(self._scores)
            left -= max(1, len(jobs))
            self._guarded(jobs, lambda jobs, prepared=prepared: self._score(jobs, prepared))

    def _guarded(self, jobs: list[Job], run) -> None:
        """A batch that goes wrong (out of memory, say) is an error of its requests, not the end of the server."""
        if not jobs:
            return
        try:
            run(jobs)
        except Exception as error:
            logger.exception("a batch of %d requests failed", len(jobs))
            self._deliver([(job, error) for job in jobs])

    def _score(self, jobs: list[Job], prepared: list[Prepared]) -> None:
        logprobs = self._model.first_token_logprobs(prepared)
        tokens = self._tokens(jobs, logprobs, logprobs.argmax(-1).tolist())
        for job, token in zip(jobs, tokens, strict=True):
            job.finish_reason = "stop" if token.id in self._model.eos_ids else "length"
        self._deliver([(job, [token], None) for job, token in zip(jobs, tokens, strict=True)])

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
            logprobs = model.decode(chosen, positions + (step - 1), cache, mask, prepared[0].adapter)

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
