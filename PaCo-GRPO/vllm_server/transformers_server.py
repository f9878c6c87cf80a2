"""A judge on a machine without vLLM: the part of OpenAI's chat API that a judge needs.

    python -m vllm_server.transformers_server --model FOLDER --served-model-name NAME --port 8000

It answers with transformers, greedily. ``top_logprobs`` are those of the first token, from which
the client computes P(Yes). Requests that arrive while a batch runs become the next batch: on a CPU
this answers five times as many.
"""

import asyncio
import base64
import logging
import os
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from paco_grpo.asgi import EXCEPTION_HANDLERS, SERVER_SETTINGS, ApiError
from paco_judge.arguments import Parser
from paco_judge.errors import run_command
from paco_judge.identity import identity, joined
from paco_judge.images import read_image
from paco_judge.pages.keys import KeyGuard
from paco_judge.scorer import Chat, JudgeScorer
from paco_judge.verdict import entry, log_softmax, top_logprobs
from paco_judge.weights import TRAINED_MAX_PIXELS

logger = logging.getLogger(__name__)

MAX_BATCH = 32  # requests


class ChatRequest(BaseModel):
    """The accepted fields; sampling options accept only the value of a greedy answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[dict] = Field(min_length=1)
    max_tokens: int = Field(512, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    temperature: float = Field(0, ge=0, le=0)
    seed: int | None = None  # without effect
    stream: Literal[False] = False

    def chat(self) -> Chat:
        """What the scorer is asked. Raises whatever an unusual request leads to."""
        images = []
        messages = []
        for message in self.messages:
            content = []
            parts = message["content"]
            if isinstance(parts, str):
                parts = [{"type": "text", "text": parts}]
            for part in parts:
                if part["type"] == "text":
                    content.append(part)
                    continue
                form, _, data = part["image_url"]["url"].partition(";base64,")
                if not form.startswith("data:image/"):  # nothing is fetched
                    raise ValueError("an image must be a data URL")
                images.append(read_image(base64.b64decode(data, validate=True)))
                content.append({"type": "image"})
            messages.append({"role": message["role"], "content": content})
        return Chat(messages, images)


@dataclass
class Job:
    """A request in the queue; ``future`` receives ``result``."""

    request: ChatRequest
    future: asyncio.Future
    chat: Chat | None = None
    result: dict | ApiError | None = None  # OpenAI's choice


class BatchWorker:
    """Answers requests in batches."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self.scorer = scorer
        self._tokenizer = scorer.processor.tokenizer
        eos = scorer.model.generation_config.eos_token_id
        self._eos_ids = {self._tokenizer.eos_token_id, *np.atleast_1d(eos).tolist()} - {None}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()

    async def ask(self, request: ChatRequest) -> dict:
        """A choice, as OpenAI writes it. Raises ApiError."""
        job = Job(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return await job.future

    async def run(self) -> None:
        """Work on the queue until it is cancelled."""
        while True:
            jobs = [await self._queue.get()]
            while len(jobs) < MAX_BATCH and not self._queue.empty():
                jobs.append(self._queue.get_nowait())
            await asyncio.to_thread(self.work, jobs)
            for job in jobs:
                if job.future.done():  # its caller has left
                    continue
                if isinstance(job.result, ApiError):
                    job.future.set_exception(job.result)
                else:
                    job.future.set_result(job.result)

    def work(self, jobs: Sequence[Job]) -> None:
        """Find the result of each job; what is wrong with one costs the others nothing."""
        batches = defaultdict(list)  # by the length of the answers
        for job in jobs:
            try:
                job.chat = job.request.chat()
                self.scorer.check(job.chat, job.request.max_tokens)
                batches[job.request.max_tokens].append(job)
            except Exception as error:  # noqa: BLE001 - it would end the worker
                job.result = ApiError(f"{type(error).__name__}: {error}", param="messages")
        for batch in batches.values():
            self._answer(batch)

    def _answer(self, batch: Sequence[Job]) -> None:
        """Generate answers of the same greatest length together."""
        try:
            chats = [job.chat for job in batch]
            ids, logits = self.scorer.generate(chats, batch[0].request.max_tokens)
        except Exception:
            logger.exception("%d requests failed", len(batch))
            if len(batch) == 1:
                message = "the engine failed on this request; its log says why"
                batch[0].result = ApiError(message, 500)
                return
            for job in batch:  # one may be too large, or all together
                self._answer([job])
            return
        for job, job_ids, job_logits in zip(batch, ids.tolist(), logits, strict=True):
            job.result = self._result(job, self.until_end(job_ids), job_logits)

    def until_end(self, ids: list[int]) -> list[int]:
        """Generated tokens up to the first that ends the answer; the rest is padding."""
        for place, token in enumerate(ids):
            if token in self._eos_ids:
                return ids[: place + 1]
        return ids

    def _result(self, job: Job, ids: list[int], logits: np.ndarray) -> dict | ApiError:
        """A choice. ``logits``: of the first token, (V,)."""
        logprobs = log_softmax(logits)
        if np.isnan(logprobs).any():
            # No 5xx, after which clients would ask again.
            return ApiError("the model's logits are not numbers: its weights are damaged", 422)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": "stop" if ids[-1] in self._eos_ids else "length",
        }
        if job.request.logprobs:
            top = top_logprobs(logprobs, self.scorer.token, job.request.top_logprobs)
            first = entry(self.scorer.token(ids[0]), logprobs[ids[0]])
            choice["logprobs"] = {"content": [first | {"top_logprobs": top}]}
        return choice


async def _refuse(request: Request, error: RequestValidationError) -> Response:
    """Name the first wrong field. Its value may be no JSON (NaN) or no text, and is not shown."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"][1:])) or "the body"
    field = place.encode("ascii", "backslashreplace").decode()
    return ApiError(f"{field}: {problem['msg']}", 422, param=field).response()


def build_app(
    worker: BatchWorker, name: str, api_key: str | None = None, weights: str | None = None
) -> FastAPI:
    """The worker as an application.

    Args:
        worker: Has the model.
        name: Under which it is served.
        api_key: Needed on every route except ``/health``.
        weights: Identity of the model (``paco_judge.identity``); None: unknown.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        work = asyncio.create_task(worker.run())
        yield
        work.cancel()

    handlers = EXCEPTION_HANDLERS | {RequestValidationError: _refuse}
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers)
    if api_key:
        app.add_middleware(KeyGuard, key=api_key)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        row = {"id": name, "object": "model", "owned_by": "paco-rl", "identity": weights}
        return JSONResponse({"object": "list", "data": [row]})

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Response:
        if request.model != name:
            message = f"model {request.model[:200]!r} is not served here; served: {name}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        completion = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": name,
            "choices": [await worker.ask(request)],
        }
        return JSONResponse(completion)

    return app


def serve() -> None:
    """The command, which runs until it is ended."""
    parser = Parser(description="Serve a judge with transformers (a subset of OpenAI's API)")
    parser.add_argument("--model", required=True, help="local folder or hub name")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--max-pixels",
        type=int,
        help="shrink larger images to it; 0: as the model says (default: VLLM_MAX_PIXELS, or "
        f"{TRAINED_MAX_PIXELS})",
    )
    text = "4 bits for linear layers: a third of the memory, other scores"
    parser.add_argument("--quantize", choices=["nf4"], help=text)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logger.info("loading the weights of %s", arguments.model)
    scorer = JudgeScorer.from_pretrained(
        arguments.model, max_pixels=arguments.max_pixels, quantize=arguments.quantize
    )
    weights = identity(arguments.model)
    if arguments.quantize:
        weights = joined([weights, arguments.quantize])  # it answers otherwise
    key = os.environ.get("VLLM_API_KEY")
    app = build_app(BatchWorker(scorer), arguments.served_model_name, key, weights)
    uvicorn.run(app, host=arguments.host, port=arguments.port, **SERVER_SETTINGS)


if __name__ == "__main__":
    sys.exit(run_command(serve, OSError, ValueError))
