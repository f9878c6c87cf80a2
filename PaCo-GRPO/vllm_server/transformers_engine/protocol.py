"""What of OpenAI's chat API is understood; everything else is refused with a clear message."""

import binascii
import hashlib
from base64 import b64decode
from collections.abc import Collection
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_IMAGES = 16
_ROLES = ("system", "user", "assistant")
# Fields that may be present with the one value that changes nothing here (None is always allowed).
_NEUTRAL = {
    "n": (1,),
    "top_p": (1, 1.0),
    "temperature": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "stop": ([],),
    "tools": ([],),
    "logit_bias": ({},),
}
_IGNORED = {"user", "seed", "metadata", "store"}  # no effect on a greedy answer
_READ = {"model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "stream"}
_READ |= {"stream_options"}


class RequestError(Exception):
    """A request that is refused: HTTP status, message, and the field that is at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict:
        """OpenAI's error format."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request as the engine works with it. ``turns``: (role, parts), a part being a text or None for an image."""

    turns: tuple[tuple[str, tuple[str | None, ...]], ...]
    images: tuple[str, ...]  # data URLs, in the order of the None parts
    max_tokens: int | None  # None: until the model ends its answer
    top_logprobs: int | None  # None: no log-probabilities
    stream: bool
    include_usage: bool
    adapter: str | None = None  # None: the base


def parse_request(body: object, served: tuple[str, ...], adapters: Collection[str] = ()) -> ChatRequest:
    """Check a decoded JSON body; ``adapters``: those of the served names that are one. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    model = body.get("model")
    if model not in served:
        raise RequestError(
            f"model {model!r} is not served here; served: {', '.join(served)}", "model", 404, "model_not_found"
        )
    for name, value in body.items():
        if name in _READ or name in _IGNORED or value is None:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"{name!r} is not supported by the transformers engine; use vLLM for it", name)
        if value not in _NEUTRAL[name]:
            raise RequestError(
                f"{name}={value!r} is not supported by the transformers engine, only {_NEUTRAL[name][0]!r}: "
                "answers are greedy",
                name,
            )
    turns, images = _messages(body.get("messages"))
    max_tokens = _integer(body, "max_completion_tokens", 1, 1 << 20)
    if max_tokens is None:
        max_tokens = _integer(body, "max_tokens", 1, 1 << 20)
    wants = _boolean(body, "logprobs")
    top = _integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wants:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    return ChatRequest(
        turns=turns,
        images=images,
        max_tokens=max_tokens,
        top_logprobs=(top or 0) if wants else None,
        stream=_boolean(body, "stream"),
        include_usage=bool(options.get("include_usage")),
        adapter=model if model in adapters else None,
    )


def image_key(url: str) -> bytes:
    """Hash of a data URL: equal urls are one image."""
    return hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=20).digest()


def image_bytes(url: str) -> bytes:
    """The file inside a ``data:image/…;base64,`` URL. Raises RequestError."""
    try:
        return b64decode(url[url.index(",") + 1 :], validate=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError(f"an image is not valid base64: {error}", "messages") from error


def _messages(messages: object) -> tuple[tuple, tuple[str, ...]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    images: list[str] = []
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RequestError(f"messages[{index}] needs a role, one of {', '.join(_ROLES)}", "messages")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise RequestError(f"messages[{index}].content must be a text or a list of parts", "messages")
        turns.append((message["role"], tuple(_part(part, index, images) for part in content)))
    if len(images) > MAX_IMAGES:
        raise RequestError(f"{len(images)} images in one request; at most {MAX_IMAGES}", "messages")
    return tuple(turns), tuple(images)


def _part(part: object, index: int, images: list[str]) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not url.startswith("data:image/") or ";base64," not in url[:64]:
            raise RequestError(
                f"messages[{index}] has an image that is not a data:image/…;base64 URL; the transformers engine "
                "fetches nothing",
                "messages",
            )
        images.append(url)
        return None
    raise RequestError(f"messages[{index}] has a part that is neither text nor image_url: {str(part)[:80]}", "messages")


def _integer(body: dict, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
        raise RequestError(f"{name} must be a whole number from {low} to {high}, got {value!r}", name)
    return value


def _boolean(body: dict, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", name)
    return bool(value)
