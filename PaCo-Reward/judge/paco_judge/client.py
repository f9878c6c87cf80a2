"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score_blocking([Pair(image_a, image_b, question)])     # from any thread
    verdicts = await judge.score([Pair(image_a, image_b, question)])        # from any event loop

All clients of a process share one HTTP session (``paco_judge.transport``) and one cache. A verdict is a probability or
an error with its cause; errors are not cached.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from paco_judge import transport
from paco_judge.images import data_url
from paco_judge.json_io import parse
from paco_judge.questions import DEFAULT_FORM, RequestForm, build_messages
from paco_judge.transport import Refused, Unreachable
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
CACHE_ENTRIES = 200_000
_CHECK_TIMEOUT_S = 10.0


class JudgeError(RuntimeError):
    """No judge answers at the base URL, it refuses us, or it does not serve the model."""


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


# P(Yes) by a hash of server, tokens that count, and request. Used on the event loop thread only.
_scores: dict[bytes, float] = {}


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
        self.model, self.form, self.deadline_s = model, form, deadline_s
        self._cache, self._headers = cache, transport.json_headers(api_key)
        self._served: str | None = None
        self._slots = asyncio.Semaphore(max_concurrency)

    async def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order; a failed pair is a verdict with an error.

        Raises:
            JudgeError: The first call found no server, or another model.
        """
        return await asyncio.wrap_future(transport.runtime().submit(self._score(list(pairs))))

    def score_blocking(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """``score`` for callers without an event loop; usable from several threads at once."""
        return transport.runtime().submit(self._score(list(pairs))).result()

    def check(self) -> str:
        """Ask the server for its models once and return the served name of ours.

        Raises:
            JudgeError: No server answers, or it does not serve the model; the message lists what it serves.
        """
        return transport.runtime().submit(self._resolve()).result()

    # Everything below runs on the event loop thread of the process.

    async def _resolve(self) -> str:
        self._served = self._served or await self._served_name()
        return self._served

    async def _served_name(self) -> str:
        url = f"{self.base_url}/v1/models"
        try:
            body = await transport.runtime().get(url, self._headers, _CHECK_TIMEOUT_S)
            served = [str(entry["id"]) for entry in parse(body)["data"]]
        except Refused as error:
            hint = "; check api_key" if error.status in (401, 403) else ""
            raise JudgeError(f"the judge at {self.base_url} refused {url}: {error}{hint}") from error
        except Unreachable as error:
            raise JudgeError(
                f"no judge answers at {self.base_url} ({error}); start one with "
                "`bash vllm_server/launch.sh` in PaCo-GRPO, or correct base_url"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise JudgeError(f"{url} does not answer like an OpenAI-compatible server: {error!r}") from error
        if self.model in served:
            return self.model
        alike = [name for name in served if name.casefold() == self.model.casefold()]
        if len(alike) == 1:
            logger.warning(
                "judge at %s serves %r; using it for %r (case-insensitive)", self.base_url, *alike, self.model
            )
            return alike[0]
        raise JudgeError(
            f"the judge at {self.base_url} does not serve {self.model!r}; it serves "
            f"{', '.join(map(repr, served)) or 'nothing'}. Ask for one of these, or launch the server with "
            f"VLLM_MODEL_NAMES={self.model}"
        )

    async def _score(self, pairs: list[Pair]) -> list[Verdict]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.deadline_s
        model = await self._resolve()
        images = {id(image): image for pair in pairs for image in pair.images}  # each is encoded once
        encoding = [loop.run_in_executor(None, data_url, image, self.form.image_format) for image in images.values()]
        urls = dict(zip(images, await asyncio.gather(*encoding, return_exceptions=True), strict=True))
        return await asyncio.gather(
            *(self._ask(model, pair.question, [urls[id(i)] for i in pair.images], deadline) for pair in pairs)
        )

    async def _ask(self, model: str, question: str, urls: Sequence[str | BaseException], deadline: float) -> Verdict:
        """The verdict from the cache or from the server."""
        if unreadable := next((url for url in urls if not isinstance(url, str)), None):
            return Verdict(None, str(unreadable))
        async with self._slots:
            first, second, *more = [*urls, None] if len(urls) == 1 else urls
            request = {
                "model": model,
                "messages": build_messages(first, second, question, self.form, more),
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 20,
            }
            body = json.dumps(request).encode()
            key = hashlib.sha256(f"{self.base_url} {self.form.answer_tokens} ".encode() + body).digest()
            if self._cache and key in _scores:
                return Verdict(_scores[key])
            try:
                answer = await transport.runtime().post(
                    f"{self.base_url}/v1/chat/completions", self._headers, body, deadline, self.deadline_s
                )
            except (Refused, Unreachable) as error:
                return Verdict(None, f"judge at {self.base_url}: {error}")
        verdict = _read_answer(answer, self.form.answer_tokens)
        if verdict.ok and self._cache:
            _scores[key] = verdict.p_yes
            if len(_scores) > CACHE_ENTRIES:
                del _scores[next(iter(_scores))]  # the oldest
        return verdict


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
