"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score_blocking([Pair(image_a, image_b, question)])     # from any thread
    verdicts = await judge.score([Pair(image_a, image_b, question)])        # from any event loop

All clients of a process share one event loop thread, one HTTP session (``paco_judge.transport``) and one cache. A
verdict is a probability or an error with its cause; errors are not cached.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from paco_judge import transport
from paco_judge.images import ImageStore, UnreadableImage
from paco_judge.json_io import parse
from paco_judge.questions import DEFAULT_FORM, RequestForm, build_messages
from paco_judge.transport import Refused, Unreachable
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
CACHE_ENTRIES = 200_000
_CHECK_TIMEOUT_S = 10.0
_URL_SLOT = "\x00"


class JudgeError(RuntimeError):
    """The judge cannot be used at all (as opposed to one pair without a score)."""


class JudgeUnavailable(JudgeError):
    """No judge answers at the base URL, or it refuses the request."""


class JudgeModelMissing(JudgeError):
    """The judge answers, but does not serve the requested model."""


@dataclass(frozen=True)
class Pair:
    """Two images and a question about them; the order of the images matters. ``image_b`` None: one image alone.
    ``more_images`` are shown after them."""

    image_a: Image.Image
    image_b: Image.Image | None
    question: str
    more_images: tuple[Image.Image, ...] = ()

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The images in the order in which they are shown."""
        return tuple(image for image in (self.image_a, self.image_b, *self.more_images) if image is not None)


class _Request(NamedTuple):
    """A pair by content: the cache's key."""

    base_url: str
    model: str
    form: RequestForm
    question: str
    digests: tuple[bytes, ...]


# Used on the event loop thread only: the most recently used scores (the last ones), and the requests in flight.
_scores: OrderedDict[_Request, float] = OrderedDict()
_in_flight: dict[_Request, asyncio.Future] = {}


class JudgeClient:
    """Asks one model of one server. Cheap to make: the HTTP session and the cache belong to the process.

    Args:
        base_url: Scheme, host and port, with or without a trailing ``/v1``.
        model: Served name, matched case-insensitively with a warning.
        api_key: Sent as a bearer token.
        max_concurrency: Requests of this client in flight.
        deadline_s: Seconds for a whole ``score`` call, retries included. A server that has accepted no connection for
            this long is not waited for by later calls either, until it answers again.
        form: Image labels, image format and the answer tokens that count.
        cache: False sends every request again.

    Raises:
        ValueError: A setting is out of range, or ``base_url`` is not an http(s) URL.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        model: str = DEFAULT_MODEL,
        *,
        api_key: str | None = None,
        max_concurrency: int = 64,
        deadline_s: float = 600.0,
        form: RequestForm = DEFAULT_FORM,
        cache: bool = True,
    ):
        transport.origin(base_url)
        if max_concurrency < 1 or deadline_s <= 0:
            raise ValueError(f"need max_concurrency >= 1 and deadline_s > 0, got {max_concurrency} and {deadline_s}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model, self.form = model, form
        self.max_concurrency, self.deadline_s = max_concurrency, deadline_s
        self._cache = cache
        self._headers = transport.json_headers(api_key)
        self._served: str | None = None
        self._resolving: asyncio.Task | None = None
        self._slots: tuple[transport.Runtime, asyncio.Semaphore] | None = None

    async def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order; a failed pair is a verdict with an error.

        Raises:
            JudgeUnavailable: No server answered the first call's question for its models.
            JudgeModelMissing: It does not serve ours.
        """
        return await asyncio.wrap_future(transport.runtime().submit(self._score(list(pairs))))

    def score_blocking(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """``score`` for callers without an event loop; usable from several threads at once."""
        return transport.runtime().submit(self._score(list(pairs))).result()

    def check(self) -> str:
        """Ask the server for its models once and return the served name of ours.

        Raises:
            JudgeUnavailable: No server answers.
            JudgeModelMissing: It does not serve the model; the message lists what it serves.
        """
        return transport.runtime().submit(self._resolve()).result()

    # Everything below runs on the event loop thread of the process.

    async def _resolve(self) -> str:
        """The served name; concurrent callers share one request."""
        if self._served is None:
            asking = self._resolving
            if asking is None or asking.done() or asking.get_loop() is not asyncio.get_running_loop():
                asking = self._resolving = asyncio.ensure_future(self._served_name())
            self._served = await asyncio.shield(asking)
        return self._served

    async def _served_name(self) -> str:
        url = f"{self.base_url}/v1/models"
        try:
            body = await transport.runtime().get(url, self._headers, _CHECK_TIMEOUT_S)
            served = [str(entry["id"]) for entry in parse(body)["data"]]
        except Refused as error:
            hint = "; check api_key" if error.status in (401, 403) else ""
            raise JudgeUnavailable(f"the judge at {self.base_url} refused {url}: {error}{hint}") from error
        except Unreachable as error:
            raise JudgeUnavailable(
                f"no judge answers at {self.base_url} ({error}); start one with "
                "`bash vllm_server/launch.sh` in PaCo-GRPO, or correct base_url"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise JudgeUnavailable(f"{url} does not answer like an OpenAI-compatible server: {error!r}") from error
        if self.model in served:
            return self.model
        alike = [name for name in served if name.casefold() == self.model.casefold()]
        if len(alike) == 1:
            logger.warning(
                "judge at %s serves %r; using it for %r (case-insensitive)", self.base_url, *alike, self.model
            )
            return alike[0]
        raise JudgeModelMissing(
            f"the judge at {self.base_url} does not serve {self.model!r}; it serves "
            f"{', '.join(map(repr, served)) or 'nothing'}. Ask for one of these, or launch the server with "
            f"VLLM_MODEL_NAMES={self.model}"
        )

    async def _score(self, pairs: list[Pair]) -> list[Verdict]:
        runtime = transport.runtime()
        deadline = runtime.loop.time() + self.deadline_s
        model = await self._resolve()
        store = ImageStore(self.form.image_format)

        async def request_of(pair: Pair) -> _Request | Verdict:
            try:
                digests = tuple([await store.digest(image) for image in pair.images])
            except UnreadableImage as error:
                return Verdict(None, str(error))
            return _Request(self.base_url, model, self.form, pair.question, digests)

        requests = await asyncio.gather(*map(request_of, pairs))
        distinct = list(dict.fromkeys(request for request in requests if isinstance(request, _Request)))
        verdicts = await asyncio.gather(*(self._answer(runtime, request, store, deadline) for request in distinct))
        answers = dict(zip(distinct, verdicts, strict=True))
        return [answers[request] if isinstance(request, _Request) else request for request in requests]

    async def _answer(
        self, runtime: transport.Runtime, request: _Request, store: ImageStore, deadline: float
    ) -> Verdict:
        """The verdict from the cache, from an identical request in flight, or from the server."""
        if self._cache and request in _scores:
            _scores.move_to_end(request)
            return Verdict(_scores[request])
        other = _in_flight.get(request)
        if other is not None and other.get_loop() is runtime.loop:  # another loop: we were forked
            shared = await asyncio.shield(other)
            if shared.ok or runtime.loop.time() >= deadline:
                return shared
        own = _in_flight[request] = runtime.loop.create_future()
        verdict = Verdict(None, "the request was abandoned")
        if self._slots is None or self._slots[0] is not runtime:
            self._slots = (runtime, asyncio.Semaphore(self.max_concurrency))
        try:
            async with self._slots[1]:
                verdict = await self._ask(runtime, request, store, deadline)
            if verdict.ok and self._cache:
                _scores[request] = verdict.p_yes
                if len(_scores) > CACHE_ENTRIES:
                    _scores.popitem(last=False)
            return verdict
        finally:
            own.set_result(verdict)
            if _in_flight.get(request) is own:
                del _in_flight[request]

    async def _ask(self, runtime: transport.Runtime, request: _Request, store: ImageStore, deadline: float) -> Verdict:
        try:
            body = _body(request, [await store.url(digest) for digest in request.digests])
            url = f"{self.base_url}/v1/chat/completions"
            answer = await runtime.post(url, self._headers, body, deadline, self.deadline_s)
        except UnreadableImage as error:
            return Verdict(None, str(error))
        except (Refused, Unreachable) as error:
            return Verdict(None, f"judge at {self.base_url}: {error}")
        return _read_answer(answer, self.form.answer_tokens)


def _body(request: _Request, image_urls: Sequence[str]) -> bytes:
    """The request as JSON. The image URLs are long and need no escaping: they are inserted afterwards."""
    first, second, *more = [_URL_SLOT] * len(image_urls) + [None] * (2 - len(image_urls))
    text = json.dumps(
        {
            "model": request.model,
            "messages": build_messages(first, second, request.question, request.form, more),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    head, *others = text.split(json.dumps(_URL_SLOT)[1:-1], len(image_urls))  # URLs come before the question
    return (head + "".join(url + part for url, part in zip(image_urls, others, strict=True))).encode("ascii")


def _read_answer(body: bytes, answer_tokens: str) -> Verdict:
    try:
        top = parse(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        if not isinstance(top, list):
            raise TypeError(f"top_logprobs is a {type(top).__name__}")
        p_yes = p_yes_from_top_logprobs(top, answer_tokens)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Verdict(None, f"the judge's answer cannot be read ({error!r}): {body[:200]!r}")
    if p_yes is None:
        tokens = [str(entry["token"]) for entry in top[:5]]
        return Verdict(None, f"neither Yes nor No is among the judge's top {len(top)} tokens (first: {tokens})")
    return Verdict(p_yes)
