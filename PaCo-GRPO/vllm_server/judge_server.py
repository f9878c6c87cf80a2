"""A judge on a machine without vLLM: the part of OpenAI's chat API that a judge needs, with transformers.

    python -m vllm_server.judge_server --model FOLDER --served-model-name NAME --port 8000

Answers are greedy. ``top_logprobs`` are those of the first token. Requests that arrive while a batch runs become the
next batch.
"""

import argparse
import asyncio
import base64
import logging
import os
import reprlib
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from paco_grpo.asgi import EXCEPTION_HANDLERS, SERVER_SETTINGS, ApiError, KeyGuard, read_body
from paco_judge.images import UnreadableImage, as_received, open_image
from paco_judge.scorer import Chat, JudgeScorer

logger = logging.getLogger(__name__)

_FAILED = "the engine failed on this request; its log says why"
MAX_BATCH = 64  # requests that are taken from the queue together
MAX_REQUEST_PIXELS = 1 << 27  # of all images of a request, 400 MB as RGB
# Padded tokens in one forward. Larger batches fall out of a CPU's caches and run slower per pair.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
_LOWEST = -9999.0  # stands for minus infinity, which is no JSON; vLLM's value


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: Annotated[
        str,
        BeforeValidator(lambda url: url.get("url") if isinstance(url, dict) else url),
        Field(pattern=r"^data:image/[a-z+.-]{1,20};base64,"),  # nothing is fetched
    ]


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(
            lambda content: (
                [{"type": "text", "text": content}] if isinstance(content, str) else content
            )
        ),
    ]


_Length = Annotated[StrictInt, Field(ge=1, le=1 << 20)]


class ChatRequest(BaseModel):
    """The accepted fields; a null counts as missing. Sampling options accept only the value of a greedy answer."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None  # OpenAI's newer name
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 0
    stream: Literal[False] = False
    n: Annotated[float, Field(ge=1, le=1)] = 1
    top_p: Annotated[float, Field(ge=1, le=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=0)] = 0
    seed: Any = None  # without effect
    user: Any = None  # without effect

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )

    @property
    def limit(self) -> int | None:
        """Tokens of the answer; None: until the model ends it."""
        return self.max_completion_tokens or self.max_tokens

    def chat(self) -> tuple[list[dict], list[str]]:
        """The messages of the scorer's ``Chat``, and the images' URLs."""
        urls, messages = [], []
        for message in self.messages:
            parts = [part.model_dump() for part in message.content]
            urls += [part["image_url"] for part in parts if "image_url" in part]
            content = [{"type": "image"} if "image_url" in part else part for part in parts]
            messages.append({"role": message.role, "content": content})
        return messages, urls


def parse_request(content: bytes, served: str, max_images: int = 16) -> ChatRequest:
    """Checks a request's body. Raises ApiError."""
    try:
        request = ChatRequest.model_validate_json(content)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = list(map(str, first["loc"])) or ["body"]
        message = f"{'.'.join(where)}: {first['msg']}, got {reprlib.repr(first['input'])}; use vLLM for other requests"
        raise ApiError(message, param=where[0]) from invalid
    if request.model != served:
        message = f"model {request.model[:200]!r} is not served here; served: {served}"
        raise ApiError(message, 404, param="model", code="model_not_found")
    if (count := len(request.chat()[1])) > max_images:
        message = f"{count} images in one request; at most {max_images} (VLLM_MAX_IMAGES)"
        raise ApiError(message, param="messages")
    return request


@dataclass
class Job:
    """A request in the queue; ``answer`` receives ``found``."""

    request: ChatRequest
    answer: asyncio.Future = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    chat: Chat | None = None
    tokens: int = 0  # of the prompt
    found: dict | ApiError | None = None  # choice and token counts


class Engine:
    """One queue, and one thread that opens images and runs the model.

    ``max_model_len``: tokens of prompt and answer together.
    """

    def __init__(self, scorer: JudgeScorer, max_model_len: int):
        self.scorer, self.max_model_len = scorer, max_model_len
        self._tokenizer = scorer.processor.tokenizer
        eos = scorer.model.generation_config.eos_token_id
        self.eos_ids = {
            *(eos if isinstance(eos, list) else [eos]),
            self._tokenizer.eos_token_id,
        } - {None}
        self._batch_tokens = _BATCH_TOKENS[scorer.model.device.type]
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def ask(self, request: ChatRequest) -> dict:
        """Choice and usage. Raises ApiError."""
        job = Job(request)
        self._queue.put_nowait(job)
        return await job.answer

    async def run(self) -> None:
        """Work on the queue until it is cancelled."""
        while True:
            jobs = [await self._queue.get()]
            while len(jobs) < MAX_BATCH and not self._queue.empty():
                jobs.append(self._queue.get_nowait())
            await asyncio.get_running_loop().run_in_executor(self._thread, self.work, jobs)
            for job in jobs:
                if not job.answer.cancelled():
                    (
                        job.answer.set_result
                        if isinstance(job.found, dict)
                        else job.answer.set_exception
                    )(job.found)

    def work(self, jobs: Sequence[Job]) -> None:
        """Find each job's answer or error; what is wrong with one costs the others nothing."""
        groups: list[list[Job]] = []  # for one forward each
        for job in jobs:
            try:
                self._open(job)
            except Exception:  # a chat template may refuse a conversation in any way
                logger.exception("a request failed")
                job.found = ApiError(_FAILED, 500)
            if job.found is None:
                longest = max(each.tokens for each in [job, *(groups[-1] if groups else [])])
                if not groups or longest * (len(groups[-1]) + 1) > self._batch_tokens:
                    groups.append([])
                groups[-1].append(job)
        while groups:
            group = groups.pop()
            try:
                self._answer(group)
            except Exception:
                logger.exception("%d requests failed", len(group))
                if len(group) > 1:
                    groups += [[job] for job in group]
                else:
                    group[0].found = ApiError(_FAILED, 500)

    def _open(self, job: Job) -> None:
        """Read the headers of a request's images, and measure its prompt."""
        try:
            messages, urls = job.request.chat()
            images = [
                open_image(base64.b64decode(url.partition(",")[2], validate=True)) for url in urls
            ]
            if sum(image.width * image.height for image in images) > MAX_REQUEST_PIXELS:
                raise UnreadableImage(
                    f"has too many pixels: at most {MAX_REQUEST_PIXELS} in a request"
                )
            job.chat = Chat(messages, images)
            job.tokens = self.scorer.length(job.chat)
        except ValueError as error:
            text = f"an image {error}" if isinstance(error, UnreadableImage) else str(error)
            job.found = ApiError(text, param="messages", code="invalid_image")
            return
        if job.tokens + (job.request.limit or 1) > self.max_model_len:
            text = f"the prompt has {job.tokens} tokens; with the answer, at most {self.max_model_len} (MAX_MODEL_LEN)"
            job.found = ApiError(text, param="messages", code="context_length_exceeded")

    def _answer(self, jobs: Sequence[Job]) -> None:
        """One forward, and more for answers of several tokens."""
        for job in jobs:
            try:
                job.chat = Chat(
                    job.chat.messages, [as_received(image) for image in job.chat.images]
                )
            except UnreadableImage as error:
                job.found = ApiError(str(error), param="messages", code="invalid_image")
        if not (jobs := [job for job in jobs if job.found is None]):
            return
        rows = self.scorer.first_token_logits([job.chat for job in jobs])
        ids = [[int(logits.argmax())] for logits in rows]
        if longer := [index for index, job in enumerate(jobs) if job.request.limit != 1]:
            limits = [jobs[i].request.limit or self.max_model_len - jobs[i].tokens for i in longer]
            written = self.scorer.generate([jobs[i].chat for i in longer], max(limits)).tolist()
            for index, row, limit in zip(longer, written, limits, strict=True):
                end = next(
                    (place + 1 for place, token in enumerate(row) if token in self.eos_ids),
                    len(row),
                )
                ids[index] = row[: min(end, limit)]
        for job, logits, tokens in zip(jobs, rows, ids, strict=True):
            if np.isnan(logits).any():
                # No 5xx, after which clients would ask again.
                job.found = ApiError(
                    "the model's logits are not numbers: its weights are damaged", 422
                )
            else:
                job.found = self._choice(job, logits, tokens)

    def _choice(self, job: Job, logits: np.ndarray, ids: list[int]) -> dict:
        """The choice and the usage, as OpenAI writes them."""
        logprobs = None
        if job.request.logprobs:
            scores = logits.astype(np.float64)
            scores -= np.logaddexp.reduce(scores)
            top = np.argpartition(-scores, job.request.top_logprobs)[: job.request.top_logprobs]
            entries = [
                self._entry(int(token), scores[token])
                for token in top[np.argsort(-scores[top], kind="stable")]
            ]
            logprobs = {
                "content": [self._entry(ids[0], scores[ids[0]]) | {"top_logprobs": entries}]
            }
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": self._tokenizer.decode(ids, skip_special_tokens=True),
            },
            "logprobs": logprobs,
            "finish_reason": "stop" if ids[-1] in self.eos_ids else "length",
        }
        usage = {
            "prompt_tokens": job.tokens,
            "completion_tokens": len(ids),
            "total_tokens": job.tokens + len(ids),
        }
        return {"choices": [choice], "usage": usage}

    def _entry(self, token: int, logprob: float) -> dict:
        return {"token": self._tokenizer.decode([token]), "logprob": max(float(logprob), _LOWEST)}


def build_app(
    engine: Engine,
    name: str,
    *,
    max_images: int = 16,
    max_body_bytes: int = 32 << 20,
    api_key: str | None = None,
) -> FastAPI:
    """The engine as an application. ``api_key``: needed on every route except ``/health``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        work = asyncio.create_task(engine.run())
        yield
        work.cancel()

    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=EXCEPTION_HANDLERS)
    if api_key:
        app.add_middleware(KeyGuard, key=api_key)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        row = {
            "id": name,
            "object": "model",
            "owned_by": "paco-rl",
            "max_model_len": engine.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [row]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse_request(await read_body(request, max_body_bytes), name, max_images)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
        }
        return JSONResponse(head | {"model": name} | await engine.ask(asked))

    return app


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Serve a judge with transformers (a subset of OpenAI's API)"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="local folder or hub name of a Qwen2.5-VL, Qwen3-VL or Qwen3.5",
    )
    parser.add_argument("--served-model-name", help="default: the value of --model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-images", type=int, default=16, help="images in one request")
    parser.add_argument("--max-body-mb", type=float, default=32)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        scorer = JudgeScorer.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        print(f"cannot serve {arguments.model}: {error}", file=sys.stderr)
        return 1
    longest = getattr(
        scorer.model.config.get_text_config(), "max_position_embeddings", arguments.max_model_len
    )
    app = build_app(
        Engine(scorer, min(arguments.max_model_len, longest)),
        arguments.served_model_name or arguments.model,
        max_images=arguments.max_images,
        max_body_bytes=int(arguments.max_body_mb * (1 << 20)),
        api_key=os.environ.get("VLLM_API_KEY") or None,
    )
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=10,
        **SERVER_SETTINGS,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
