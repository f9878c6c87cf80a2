"""The part of OpenAI's chat API that the engine understands; it refuses everything else with a clear message."""

import binascii
import reprlib
from base64 import b64decode
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
)

from paco_grpo.asgi import ApiError

MAX_TOP_LOGPROBS = 20


def _check_data_url(url: str) -> str:
    if not url.startswith("data:image/") or ";base64," not in url[:64]:
        raise ValueError("an image must be a data:image/…;base64 URL; the transformers engine fetches nothing")
    return url


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: Annotated[
        str,
        BeforeValidator(lambda url: url.get("url") if isinstance(url, dict) else url),
        AfterValidator(_check_data_url),
    ]


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content),
    ]


class _StreamOptions(BaseModel):
    include_usage: bool = False


_Length = Annotated[StrictInt, Field(ge=1, le=1 << 20)]


class _ChatBody(BaseModel):
    """The accepted fields; a null counts as missing. Sampling options accept only the value of a greedy answer."""

    model_config = ConfigDict(extra="forbid")

    model: Any = None
    messages: list[_Message] = Field(min_length=1)
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    stream: StrictBool = False
    stream_options: _StreamOptions = _StreamOptions()
    n: Annotated[int, Field(ge=1, le=1)] = 1
    top_p: Annotated[float, Field(ge=1, le=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    stop: Annotated[list, Field(max_length=0)] = []
    tools: Annotated[list, Field(max_length=0)] = []
    logit_bias: Annotated[dict, Field(max_length=0)] = {}
    # Without effect on a greedy answer.
    user: Any = None
    seed: Any = None
    metadata: Any = None
    store: Any = None


@dataclass(frozen=True)
class ChatRequest:
    """A request as the engine works with it."""

    model: str
    turns: tuple[tuple[str, tuple[str | None, ...]], ...]  # (role, parts); a part is a text, or None for an image
    images: tuple[str, ...]  # data URLs, in the order of the None parts
    max_tokens: int | None  # None: until the model ends its answer
    top_logprobs: int | None  # None: no log-probabilities
    stream: bool
    include_usage: bool
    adapter: str | None = None  # None: the base


def parse_request(
    content: bytes, served: tuple[str, ...], adapters: Collection[str] = (), max_images: int = 16
) -> ChatRequest:
    """Checks a request's body. ``adapters``: which of the served names are adapters. Raises ApiError."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    model = body.get("model")
    if model not in served:
        message = f"model {reprlib.repr(model)} is not served here; served: {', '.join(served)}"
        raise ApiError(message, 404, param="model", code="model_not_found")
    try:
        parsed = _ChatBody.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as invalid:
        raise _refusal(invalid) from invalid
    if parsed.top_logprobs and not parsed.logprobs:
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    parts = [part for message in parsed.messages for part in message.content]
    images = tuple(part.image_url for part in parts if isinstance(part, _ImagePart))
    if len(images) > max_images:
        message = f"{len(images)} images in one request; at most {max_images} (VLLM_MAX_IMAGES)"
        raise ApiError(message, param="messages")
    turns = [
        (message.role, tuple(part.text if isinstance(part, _TextPart) else None for part in message.content))
        for message in parsed.messages
    ]
    return ChatRequest(
        model=model,
        turns=tuple(turns),
        images=images,
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        top_logprobs=parsed.top_logprobs if parsed.logprobs else None,
        stream=parsed.stream,
        include_usage=parsed.stream_options.include_usage,
        adapter=model if model in adapters else None,
    )


def _refusal(invalid: ValidationError) -> ApiError:
    first = invalid.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    message = f"{where}: {first['msg']}, got {reprlib.repr(first['input'])}; the transformers engine answers greedily"
    return ApiError(f"{message}, use vLLM for other requests", param=str(first["loc"][0]))


def image_bytes(url: str) -> bytes:
    """Decodes the file inside a ``data:image/…;base64,`` URL. Raises ApiError."""
    try:
        return b64decode(url[url.index(",") + 1 :], validate=True)
    except (ValueError, binascii.Error) as error:
        raise ApiError(f"an image is not valid base64: {error}", param="messages") from error
