"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score([Pair(image_a, image_b, question)])

Probabilities are cached by the whole request.
"""

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from paco_judge import transport
from paco_judge.images import UnreadableImage, encode
from paco_judge.json_io import parse
from paco_judge.questions import DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import TOP_LOGPROBS, Answer, Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
CACHE_ENTRIES = 200_000
MODELS_TIMEOUT_S = 10.0
FIRST_ANSWER_S = 120.0  # for the pair of ``prove``, if ``deadline_s`` is longer
SCORING = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
# Of the whole process, by ``_Request.key``; the oldest entries go first.
_scores: dict[bytes, float] = {}


class JudgeError(RuntimeError):
    """No judge answers, it refuses us, or it does not serve the model."""


@dataclass(frozen=True)
class _SentImage:
    """An image as requests carry it. It is encoded and hashed once, in however many pairs it is."""

    url: bytes
    digest: bytes

    @classmethod
    def of(cls, image: Image.Image, image_format: str) -> "_SentImage":
        """Encode an image. Raises UnreadableImage."""
        content = base64.b64encode(encode(image, image_format))
        url = b"data:image/%s;base64,%s" % (image_format.encode(), content)
        return cls(url, hashlib.sha256(url).digest())


@dataclass(frozen=True)
class _Request:
    """A request's JSON without its images' URLs, and the images that belong between its parts."""

    parts: list[bytes]
    images: list[_SentImage]

    @classmethod
    def of(cls, images: Sequence[_SentImage], fields: dict[str, Any]) -> "_Request":
        """The request with these fields, in which images have empty URLs, in order."""
        # Quotes inside a JSON text have a backslash before them, so only an empty URL reads so.
        return cls(json.dumps(fields).encode().split(b'"url": ""'), list(images))

    def key(self, client: "JudgeClient") -> bytes:
        """A hash of server, tokens that count, and everything that is sent."""
        digest = hashlib.sha256(f"{client.base_url} {client.form.answer_tokens} ".encode())
        for part in self.parts:
            digest.update(hashlib.sha256(part).digest())
        for image in self.images:
            digest.update(image.digest)
        return digest.digest()

    def body(self) -> bytes:
        """The JSON. URLs are copied as they are, because base64 needs no escaping."""
        pieces = [self.parts[0]]
        for image, part in zip(self.images, self.parts[1:], strict=True):
            pieces += [b'"url": "', image.url, b'"', part]
        return b"".join(pieces)


class JudgeClient:
    """Asks one model of one server; usable from several threads at once.

    Args:
        base_url: With or without a trailing ``/v1``.
        model: Served name, in upper or lower case.
        api_key: Sent as a bearer token.
        max_concurrency: Requests in flight.
        deadline_s: Seconds for a whole ``score``, retries included. Later calls do not wait again
            for a server that has answered nothing for so long: they try briefly until it answers.
        form: How images are labeled and encoded, and which tokens count as Yes and No.
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
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is not an http:// or https:// URL")
        if max_concurrency < 1 or deadline_s <= 0:
            raise ValueError(
                "need max_concurrency >= 1 and deadline_s > 0, "
                f"got {max_concurrency} and {deadline_s}"
            )
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.form = form
        self.max_concurrency = max_concurrency
        self.deadline_s = deadline_s
        self._headers = transport.json_headers(api_key)
        self._served: str | None = None
        # By event loop, because a forked process has another one.
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def check(self) -> str:
        """The served name of the model; the server is asked once. Raises JudgeError."""
        if self._served is None:
            self._served = self._find_model()
        return self._served

    def _find_model(self) -> str:
        url = f"{self.base_url}/v1/models"
        deadline = time.monotonic() + MODELS_TIMEOUT_S
        try:
            answer = transport.run(transport.request("GET", url, self._headers, deadline))
            served = [str(row["id"]) for row in parse(answer)["data"]]
        except transport.NoAnswer as error:
            if error.status in (401, 403):
                raise JudgeError(
                    f"the judge at {self.base_url} refuses the API key ({error}); set VLLM_API_KEY "
                    "to its key, or api_key in Python"
                ) from error
            hint = (
                "; start one (in PaCo-GRPO: `bash vllm_server/launch.sh`), or correct the address"
            )
            if error.status:
                hint = ""
            raise JudgeError(f"no judge answers at {url}: {error}{hint}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise JudgeError(
                f"{url} does not answer like an OpenAI-compatible server: {error!r}"
            ) from error
        if self.model in served:
            return self.model
        for name in served:
            if name.casefold() == self.model.casefold():
                logger.warning(
                    "the judge at %s serves %r; using it for %r", self.base_url, name, self.model
                )
                return name
        names = ", ".join(map(repr, served)) or "nothing"
        raise JudgeError(
            f"the judge at {self.base_url} does not serve {self.model!r}; it serves {names}"
        )

    def prove(self, pair: Pair, writes: bool = False) -> None:
        """Ask one pair before a long run: a server may list its models and answer no question.

        Args:
            writes: The run reads whole answers: one token must come back, but not Yes or No.

        Raises:
            JudgeError: No P(Yes) within ``FIRST_ANSWER_S`` or ``deadline_s``, whichever is shorter.
        """
        seconds = min(self.deadline_s, FIRST_ANSWER_S)
        deadline = time.monotonic() + seconds
        fields = SCORING if not writes else {"temperature": 0, "max_tokens": 1}
        ((_, error),) = transport.run(self._ask_all(self.check(), [pair], fields, deadline))
        if error is not None:
            raise JudgeError(
                f"the judge {self.model} at {self.base_url} did not score a pair of images within "
                f"{seconds:.0f} s ({error}); look at its log, or ask another model"
            )

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order.

        Raises JudgeError: The first call found no server, or another model.
        """
        model = self.check()
        deadline = time.monotonic() + self.deadline_s
        answers = transport.run(self._ask_all(model, pairs, SCORING, deadline))
        return [Verdict(p_yes, error) for p_yes, error in answers]

    def generate(self, pairs: Sequence[Pair], max_tokens: int, **sampling: float) -> list[Answer]:
        """The whole answer to each pair, in order. Raises JudgeError.

        ``deadline_s`` is for each answer. ``sampling``: such as ``seed``; greedy by default.
        """
        fields = {"temperature": 0, "max_tokens": max_tokens} | sampling
        answers = transport.run(self._ask_all(self.check(), pairs, fields, None))
        return [Answer(text, error) for text, error in answers]

    async def _ask_all(
        self, model: str, pairs: Sequence[Pair], fields: dict[str, Any], deadline: float | None
    ) -> list[tuple[Any, str | None]]:
        """What ``fields`` ask for, and why it is missing, for each pair.

        ``deadline`` None: each has its own.
        """
        images = {id(image): image for pair in pairs for image in pair.images}
        encoding = [self._send(image) for image in images.values()]
        sent = dict(zip(images, await asyncio.gather(*encoding), strict=True))
        asking = [
            self._ask(model, pair.question, [sent[id(i)] for i in pair.images], fields, deadline)
            for pair in pairs
        ]
        return await asyncio.gather(*asking)

    async def _send(self, image: Image.Image) -> _SentImage | UnreadableImage:
        try:
            return await asyncio.to_thread(_SentImage.of, image, self.form.image_format)
        except UnreadableImage as error:
            return error

    async def _ask(
        self,
        model: str,
        question: str,
        images: list[_SentImage | UnreadableImage],
        fields: dict[str, Any],
        deadline: float | None,
    ) -> tuple[float | str | None, str | None]:
        for image in images:
            if isinstance(image, UnreadableImage):
                return None, str(image)
        messages = build_messages([""] * len(images), question, self.form)
        request = _Request.of(images, {"model": model, "messages": messages} | fields)
        key = request.key(self)
        if key in _scores:
            return _scores[key], None
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self.max_concurrency)):
            url = f"{self.base_url}/v1/chat/completions"
            end = deadline or time.monotonic() + self.deadline_s
            try:
                answer = await transport.post(url, self._headers, request.body(), end)
            except transport.NoAnswer as error:
                return None, f"judge at {self.base_url}: {error}"
        try:
            choice = parse(answer)["choices"][0]
            if fields is not SCORING:  # a text was asked for, not P(Yes)
                return choice["message"]["content"] or "", None
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            tokens = [str(entry["token"]) for entry in top]
            p_yes = p_yes_from_top_logprobs(top, self.form.answer_tokens)
        except (ValueError, LookupError, TypeError) as error:
            return None, f"the judge's answer cannot be read ({error!r}): {answer[:200]!r}"
        if p_yes is None:
            shown = f"top {len(tokens)} tokens (first: {tokens[:5]})"
            return None, f"neither Yes nor No is among the judge's {shown}"
        _scores[key] = p_yes
        if len(_scores) > CACHE_ENTRIES:
            del _scores[next(iter(_scores))]
        return p_yes, None
