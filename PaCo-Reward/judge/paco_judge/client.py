"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score_blocking([Pair(image_a, image_b, question)])     # from any thread
    verdicts = await judge.score([Pair(image_a, image_b, question)])        # from any event loop

A verdict is a probability, or an error with its cause. Probabilities are cached by the whole request.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from paco_judge import transport
from paco_judge.images import data_url
from paco_judge.json_io import parse
from paco_judge.questions import DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
CACHE_ENTRIES = 200_000
_scores: dict[bytes, float] = {}  # of the whole process, by a hash of server, tokens that count, and request


class JudgeError(RuntimeError):
    """No judge answers at the base URL, it refuses us, or it does not serve the model."""


class JudgeClient:
    """Asks one model of one server.

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
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is not an http:// or https:// URL")
        if max_concurrency < 1 or deadline_s <= 0:
            raise ValueError(f"need max_concurrency >= 1 and deadline_s > 0, got {max_concurrency} and {deadline_s}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model, self.form, self.deadline_s = model, form, deadline_s
        self._cache, self._headers = cache, transport.json_headers(api_key)
        self._served: str | None = None
        self._slots = asyncio.Semaphore(max_concurrency)

    async def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """``score_blocking`` for callers with an event loop."""
        return await asyncio.to_thread(self.score_blocking, pairs)

    def score_blocking(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order; usable from several threads at once.

        Raises:
            JudgeError: The first call found no server, or another model.
        """
        return transport.run(self._each(pairs, self.check(), self._ask))

    def write_blocking(
        self, pairs: Sequence[Pair], max_tokens: int, *, temperature: float = 0, **sampling: float
    ) -> list[tuple[str | None, str | None]]:
        """The whole answer to each pair's question and None, or None and why there is none. Raises JudgeError.

        Answers take long: ``deadline_s`` is for each of them, from when it is sent. ``sampling``: such as ``seed``.
        """
        settings = {"max_tokens": max_tokens, "temperature": temperature, **sampling}
        return transport.run(self._each(pairs, self.check(), partial(self._write, settings)))

    def check(self) -> str:
        """Ask the server for its models once and return the served name of ours.

        Raises:
            JudgeError: No server answers, or it does not serve the model; the message lists what it serves.
        """
        self._served = self._served or self._match(transport.run(self._list()))
        return self._served

    async def _list(self) -> list[str]:
        url = f"{self.base_url}/v1/models"
        try:
            return [str(row["id"]) for row in parse(await transport.request("GET", url, self._headers, _in(10.0)))["data"]]
        except transport.NoAnswer as error:
            hint = "; start one with `bash vllm_server/launch.sh` in PaCo-GRPO, or correct base_url"
            hint = {None: hint, 401: "; check api_key", 403: "; check api_key"}.get(error.status, "")
            raise JudgeError(f"no judge answers at {url}: {error}{hint}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise JudgeError(f"{url} does not answer like an OpenAI-compatible server: {error!r}") from error

    def _match(self, served: list[str]) -> str:
        alike = [name for name in served if name.casefold() == self.model.casefold()]
        if self.model in served:
            return self.model
        if len(alike) != 1:
            names = ", ".join(map(repr, served))
            raise JudgeError(f"the judge at {self.base_url} does not serve {self.model!r}; it serves {names or 'nothing'}")
        logger.warning("the judge at %s serves %r; using it for %r", self.base_url, alike[0], self.model)
        return alike[0]

    async def _each(self, pairs: Sequence[Pair], model: str, ask: Callable) -> list:
        deadline = _in(self.deadline_s)
        images = {id(image): image for pair in pairs for image in pair.images}  # each is encoded once
        encoding = [asyncio.to_thread(data_url, image, self.form.image_format) for image in images.values()]
        urls = dict(zip(images, await asyncio.gather(*encoding, return_exceptions=True), strict=True))
        return await asyncio.gather(
            *(ask(model, pair.question, [urls[id(i)] for i in pair.images], deadline) for pair in pairs)
        )

    async def _ask(self, model: str, question: str, urls: Sequence[str | BaseException], deadline: float) -> Verdict:
        if unreadable := next((url for url in urls if not isinstance(url, str)), None):
            return Verdict(None, str(unreadable))
        async with self._slots:
            request = {"model": model, "messages": build_messages(urls, question, self.form), "max_tokens": 1}
            body = json.dumps(request | {"temperature": 0, "logprobs": True, "top_logprobs": 20}).encode()
            key = hashlib.sha256(f"{self.base_url} {self.form.answer_tokens} ".encode() + body).digest()
            if self._cache and key in _scores:
                return Verdict(_scores[key])
            try:
                answer = await transport.post(f"{self.base_url}/v1/chat/completions", self._headers, body, deadline)
            except transport.NoAnswer as error:
                return Verdict(None, f"judge at {self.base_url}: {error}")
        verdict = _read_answer(answer, self.form.answer_tokens)
        if verdict.ok and self._cache:
            _scores[key] = verdict.p_yes
            if len(_scores) > CACHE_ENTRIES:
                del _scores[next(iter(_scores))]  # the oldest
        return verdict

    async def _write(
        self, settings: dict, model: str, question: str, urls: Sequence[str | BaseException], _: float
    ) -> tuple[str | None, str | None]:
        if unreadable := next((url for url in urls if not isinstance(url, str)), None):
            return None, str(unreadable)
        request = {"model": model, "messages": build_messages(urls, question, self.form)}
        body = json.dumps(request | settings).encode()
        try:
            async with self._slots:
                deadline = _in(self.deadline_s)
                answer = await transport.post(f"{self.base_url}/v1/chat/completions", self._headers, body, deadline)
            return parse(answer)["choices"][0]["message"]["content"] or "", None
        except (transport.NoAnswer, ValueError, LookupError, TypeError) as error:
            return None, f"judge at {self.base_url}: {error}"


def _in(seconds: float) -> float:
    return time.monotonic() + seconds


def _read_answer(body: bytes, answer_tokens: str) -> Verdict:
    try:
        top = parse(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        if not isinstance(top, list):
            raise TypeError(f"top_logprobs is a {type(top).__name__}")
        p_yes = p_yes_from_top_logprobs(top, answer_tokens)
    except (ValueError, LookupError, TypeError) as error:
        return Verdict(None, f"the judge's answer cannot be read ({error!r}): {body[:200]!r}")
    if p_yes is None:
        tokens = [str(entry["token"]) for entry in top[:5]]
        return Verdict(None, f"neither Yes nor No is among the judge's top {len(top)} tokens (first: {tokens})")
    return Verdict(p_yes)
