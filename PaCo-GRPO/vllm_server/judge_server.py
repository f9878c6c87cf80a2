"""A judge on a machine without vLLM: the part of OpenAI's chat API that a judge needs.

    python -m vllm_server.judge_server --model FOLDER --served-model-name NAME --port 8000

It answers with transformers, greedily. ``top_logprobs`` are those of the first token. Requests that
arrive while a batch runs become the next batch. A request is read by ``parse_request``, waits in
``BatchWorker.ask``, and is answered by ``BatchWorker.work``.
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
from collections.abc import Awaitable, Callable, Sequence
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
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from paco_grpo.asgi import EXCEPTION_HANDLERS, SERVER_SETTINGS, ApiError, KeyGuard, read_body
from paco_judge.images import UnreadableImage, as_received, open_image
from paco_judge.scorer import EDGES, Chat, JudgeScorer, set_limits

logger = logging.getLogger(__name__)

_FAILED = "the engine failed on this request; its log says why"
MAX_BATCH = 64  # requests that are taken from the queue together
MAX_REQUEST_PIXELS = 1 << 25  # of all images of a request: two of 16 megapixels
# Padded tokens in one forward. Larger batches fall out of a CPU's caches and run slower per pair.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
_LOWEST = -9999.0  # stands for minus infinity, which is no JSON; vLLM's value


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: str = Field(pattern=r"^data:image/[a-z+.-]{1,20};base64,")  # nothing is fetched

    @field_validator("image_url", mode="before")
    @classmethod
    def _unwrap(cls, url: Any) -> Any:
        """OpenAI's form of it is an object with a ``url``."""
        return url.get("url") if isinstance(url, dict) else url


_Part = Annotated[_TextPart | _ImagePart, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: list[_Part] = Field(min_length=1)

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        """A string is a list of one text."""
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Length = Annotated[StrictInt, Field(ge=1, le=1 << 20)]


class ChatRequest(BaseModel):
    """The accepted fields; a null counts as missing.

    Sampling options accept only the value of a greedy answer.
    """

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
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    @property
    def limit(self) -> int | None:
        """Tokens of the answer; None: until the model ends it."""
        return self.max_completion_tokens or self.max_tokens

    def chat(self) -> tuple[list[dict], list[str]]:
        """The messages of the scorer's ``Chat``, and the images' URLs."""
        urls = []
        messages = []
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
        where = [str(part) for part in first["loc"]] or ["body"]
        value = reprlib.repr(first["input"])
        message = f"{'.'.join(where)}: {first['msg']}, got {value}; use vLLM for other requests"
        raise ApiError(message, param=where[0]) from invalid
    if request.model != served:
        message = f"model {request.model[:200]!r} is not served here; served: {served}"
        raise ApiError(message, 404, param="model", code="model_not_found")
    _, urls = request.chat()
    count = len(urls)
    if count > max_images:
        message = f"{count} images in one request; at most {max_images} (VLLM_MAX_IMAGES)"
        raise ApiError(message, param="messages")
    return request


async def _stays() -> bool:
    return False


@dataclass
class Job:
    """A request in the queue; ``future`` receives ``result``."""

    request: ChatRequest
    caller_left: Callable[[], Awaitable[bool]] = _stays
    future: asyncio.Future = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    chat: Chat | None = None
    tokens: int = 0  # of the prompt
    result: dict | ApiError | None = None  # choice and token counts


class BatchWorker:
    """One queue, and one thread that opens images and runs the model.

    ``max_model_len``: tokens of prompt and answer together.
    """

    def __init__(self, scorer: JudgeScorer, max_model_len: int):
        self.scorer = scorer
        self.max_model_len = max_model_len
        self._tokenizer = scorer.processor.tokenizer
        eos = scorer.model.generation_config.eos_token_id
        eos_ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = {*eos_ids, self._tokenizer.eos_token_id} - {None}
        # No text of more bytes fits: it is refused before the tokenizer works on it for seconds.
        self._most_bytes = max_model_len * max(map(len, self._tokenizer.get_vocab()))
        self._batch_tokens = _BATCH_TOKENS[scorer.model.device.type]
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def ask(
        self, request: ChatRequest, caller_left: Callable[[], Awaitable[bool]] = _stays
    ) -> dict:
        """Choice and usage. ``caller_left``: asked before any work is done. Raises ApiError."""
        job = Job(request, caller_left)
        self._queue.put_nowait(job)
        return await job.future

    async def run(self) -> None:
        """Work on the queue until it is cancelled."""
        while True:
            jobs = [await self._queue.get()]
            while len(jobs) < MAX_BATCH and not self._queue.empty():
                jobs.append(self._queue.get_nowait())
            for job in jobs:
                if await job.caller_left():
                    job.result = ApiError("the caller left", 499)
            await asyncio.get_running_loop().run_in_executor(self._thread, self.work, jobs)
            for job in jobs:
                if job.future.cancelled():
                    continue
                if isinstance(job.result, ApiError):
                    job.future.set_exception(job.result)
                else:
                    job.future.set_result(job.result)

    def work(self, jobs: Sequence[Job]) -> None:
        """Find the result of each job without one.

        What is wrong with one costs the others nothing.
        """
        groups: list[list[Job]] = []  # for one forward each
        for job in jobs:
            if job.result is not None:
                continue
            try:
                self._open(job)
            except Exception:  # a chat template may refuse a conversation in any way
                logger.exception("a request failed")
                job.result = ApiError(_FAILED, 500)
            if job.result is not None:
                continue
            group = groups[-1] if groups else []
            longest = max(member.tokens for member in [job, *group])
            if not groups or longest * (len(group) + 1) > self._batch_tokens:
                groups.append([])
            groups[-1].append(job)
        while groups:
            group = groups.pop()
            try:
                self._run(group)
            except Exception:
                logger.exception("%d requests failed", len(group))
                if len(group) > 1:
                    groups += [[job] for job in group]
                else:
                    group[0].result = ApiError(_FAILED, 500)

    def _open(self, job: Job) -> None:
        """Read the headers of a request's images, and measure its prompt."""
        try:
            messages, urls = job.request.chat()
            self._check_text(messages)
            images = [
                open_image(base64.b64decode(url.partition(",")[2], validate=True)) for url in urls
            ]
            if sum(image.width * image.height for image in images) > MAX_REQUEST_PIXELS:
                raise UnreadableImage(
                    f"has too many pixels: at most {MAX_REQUEST_PIXELS} in a request; "
                    "make it smaller"
                )
            job.chat = Chat(messages, images)
            job.tokens = self.scorer.length(job.chat)
        except ApiError as error:
            job.result = error
            return
        except ValueError as error:
            text = f"an image {error}" if isinstance(error, UnreadableImage) else str(error)
            job.result = ApiError(text, param="messages", code="invalid_image")
            return
        if job.tokens + (job.request.limit or 1) > self.max_model_len:
            job.result = self._too_long(f"{job.tokens} tokens")

    def _check_text(self, messages: Sequence[dict]) -> None:
        """Refuse a text that no tokenization could shorten enough. Raises ApiError."""
        parts = [part for message in messages for part in message["content"]]
        num_bytes = sum(len(part.get("text", "").encode()) for part in parts)
        if num_bytes > self._most_bytes:
            raise self._too_long(f"{num_bytes} bytes of text")

    def _too_long(self, size: str) -> ApiError:
        message = (
            f"the prompt has {size}; with the answer, at most {self.max_model_len} tokens "
            "(MAX_MODEL_LEN)"
        )
        return ApiError(message, param="messages", code="context_length_exceeded")

    def _run(self, jobs: Sequence[Job]) -> None:
        """One forward, and more for answers of several tokens."""
        for job in jobs:
            try:
                images = [as_received(image) for image in job.chat.images]
                job.chat = Chat(job.chat.messages, images)
            except UnreadableImage as error:
                job.result = ApiError(str(error), param="messages", code="invalid_image")
        jobs = [job for job in jobs if job.result is None]
        if not jobs:
            return
        rows = self.scorer.first_token_logits([job.chat for job in jobs])
        ids = [[int(logits.argmax())] for logits in rows]
        longer = [index for index, job in enumerate(jobs) if job.request.limit != 1]
        if longer:
            limits = [jobs[i].request.limit or self.max_model_len - jobs[i].tokens for i in longer]
            chats = [jobs[index].chat for index in longer]
            generated, _ = self.scorer.generate(chats, max(limits))
            for index, tokens, limit in zip(longer, generated.tolist(), limits, strict=True):
                ids[index] = self._until_end(tokens)[:limit]
        for job, logits, tokens in zip(jobs, rows, ids, strict=True):
            if np.isnan(logits).any():
                # No 5xx, after which clients would ask again.
                job.result = ApiError(
                    "the model's logits are not numbers: its weights are damaged", 422
                )
            else:
                job.result = self._choice(job, logits, tokens)

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Generated tokens up to the first that ends the answer."""
        for place, token in enumerate(tokens):
            if token in self.eos_ids:
                return tokens[: place + 1]
        return tokens

    def _choice(self, job: Job, logits: np.ndarray, ids: list[int]) -> dict:
        """The choice and the usage, as OpenAI writes them."""
        logprobs = None
        if job.request.logprobs:
            scores = logits.astype(np.float64)
            scores -= np.logaddexp.reduce(scores)
            count = min(job.request.top_logprobs, len(scores))
            top = np.argpartition(-scores, count - 1)[:count]
            top = top[np.argsort(-scores[top], kind="stable")]
            entries = [self._entry(int(token), scores[token]) for token in top]
            first = self._entry(ids[0], scores[ids[0]])
            logprobs = {"content": [first | {"top_logprobs": entries}]}
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
    engine: BatchWorker,
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
        body = await read_body(request, max_body_bytes)
        result = await engine.ask(parse_request(body, name, max_images), request.is_disconnected)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
        }
        return JSONResponse(head | {"model": name} | result)

    return app


def main() -> int:
    """The command; returns its exit status."""
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
    parser.add_argument(
        "--max-pixels", type=int, help="shrink larger images to it (default: as the model says)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logger.info("loading the weights of %s", arguments.model)
    try:
        scorer = JudgeScorer.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        print(f"cannot serve {arguments.model}: {error}", file=sys.stderr)
        return 1
    if arguments.max_pixels:
        size = scorer.processor.image_processor.size
        set_limits(
            scorer.processor, {edge: min(size[edge], arguments.max_pixels) for edge in EDGES}
        )
    longest = getattr(
        scorer.model.config.get_text_config(), "max_position_embeddings", arguments.max_model_len
    )
    app = build_app(
        BatchWorker(scorer, min(arguments.max_model_len, longest)),
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
