"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score_blocking([Pair(image_a, image_b, question)])

Probabilities are cached by the whole request.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence

from paco_judge import transport
from paco_judge.images import data_url
from paco_judge.json_io import parse
from paco_judge.questions import DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import TOP_LOGPROBS, Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
CACHE_ENTRIES = 200_000
_scores: dict[
    bytes, float
] = {}  # of the whole process, by a hash of server, tokens that count, and request


class JudgeError(RuntimeError):
    """No judge answers, it refuses us, or it does not serve the model."""


class JudgeClient:
    """Asks one model of one server; usable from several threads at once.

    Args:
        base_url: With or without a trailing ``/v1``.
        model: Served name, in upper or lower case.
        max_concurrency: Requests in flight.
        deadline_s: Seconds for a whole ``score_blocking``, retries included. Later calls do not wait for a server that
            has accepted no connection for this long, until it answers again.
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
                f"need max_concurrency >= 1 and deadline_s > 0, got {max_concurrency} and {deadline_s}"
            )
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model, self.form, self.max_concurrency, self.deadline_s = (
            model,
            form,
            max_concurrency,
            deadline_s,
        )
        self._headers = transport.json_headers(api_key)
        self._served: str | None = None
        self._slots: dict[
            asyncio.AbstractEventLoop, asyncio.Semaphore
        ] = {}  # a forked process has another loop

    def check(self) -> str:
        """The served name of the model; the server is asked once. Raises JudgeError."""
        if self._served:
            return self._served
        url = f"{self.base_url}/v1/models"
        try:
            answer = transport.run(
                transport.request("GET", url, self._headers, time.monotonic() + 10.0)
            )
            served = [str(row["id"]) for row in parse(answer)["data"]]
        except transport.NoAnswer as error:
            hint = (
                ""
                if error.status
                else "; start one with `bash vllm_server/launch.sh`, or correct base_url"
            )
            raise JudgeError(f"no judge answers at {url}: {error}{hint}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise JudgeError(
                f"{url} does not answer like an OpenAI-compatible server: {error!r}"
            ) from error
        alike = [name for name in served if name.casefold() == self.model.casefold()]
        if not alike:
            names = ", ".join(map(repr, served)) or "nothing"
            raise JudgeError(
                f"the judge at {self.base_url} does not serve {self.model!r}; it serves {names}"
            )
        if self.model not in alike:
            logger.warning(
                "the judge at %s serves %r; using it for %r", self.base_url, alike[0], self.model
            )
        self._served = self.model if self.model in alike else alike[0]
        return self._served

    def score_blocking(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order. Raises JudgeError: The first call found no server, or another model."""
        return [
            Verdict(*found) for found in transport.run(self._ask_all(self.check(), pairs, None))
        ]

    def write_blocking(
        self, pairs: Sequence[Pair], max_tokens: int, **sampling: float
    ) -> list[tuple[str | None, str | None]]:
        """Each pair's whole answer and None, or None and why there is none. Raises JudgeError.

        ``deadline_s`` is for each answer. ``sampling``: such as ``seed``; greedy by default.
        """
        sampling = {"temperature": 0, "max_tokens": max_tokens} | sampling
        return transport.run(self._ask_all(self.check(), pairs, sampling))

    async def _ask_all(
        self, model: str, pairs: Sequence[Pair], sampling: dict[str, float] | None
    ) -> list[tuple]:
        deadline = None if sampling else time.monotonic() + self.deadline_s
        images = {
            id(image): image for pair in pairs for image in pair.images
        }  # each is encoded once
        encoding = [
            asyncio.to_thread(data_url, image, self.form.image_format) for image in images.values()
        ]
        urls = dict(
            zip(images, await asyncio.gather(*encoding, return_exceptions=True), strict=True)
        )
        asked = [(pair.question, [urls[id(image)] for image in pair.images]) for pair in pairs]
        return await asyncio.gather(
            *(self._ask(model, *each, sampling, deadline) for each in asked)
        )

    async def _ask(
        self,
        model: str,
        question: str,
        urls: list[str | Exception],
        sampling: dict | None,
        deadline: float | None,
    ) -> tuple[float | str | None, str | None]:
        """The answer's text, or P(Yes) if ``sampling`` is None; and why there is none."""
        if unreadable := next((url for url in urls if not isinstance(url, str)), None):
            return None, str(unreadable)
        fields = sampling or {
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        async with self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrency)
        ):
            request = {
                "model": model,
                "messages": build_messages(urls, question, self.form),
            } | fields
            body = json.dumps(request).encode()
            key = hashlib.sha256(
                f"{self.base_url} {self.form.answer_tokens} ".encode() + body
            ).digest()
            if key in _scores:
                return _scores[key], None
            end = deadline or time.monotonic() + self.deadline_s
            try:
                answer = await transport.post(
                    f"{self.base_url}/v1/chat/completions", self._headers, body, end
                )
            except transport.NoAnswer as error:
                return None, f"judge at {self.base_url}: {error}"
        try:
            choice = parse(answer)["choices"][0]
            if sampling:
                return choice["message"]["content"] or "", None
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            tokens = [str(entry["token"]) for entry in top]
            p_yes = p_yes_from_top_logprobs(top, self.form.answer_tokens)
        except (ValueError, LookupError, TypeError) as error:
            return None, f"the judge's answer cannot be read ({error!r}): {answer[:200]!r}"
        if p_yes is None:
            return (
                None,
                f"neither Yes nor No is among the judge's top {len(tokens)} tokens (first: {tokens[:5]})",
            )
        _scores[key] = p_yes
        if len(_scores) > CACHE_ENTRIES:
            del _scores[next(iter(_scores))]  # the oldest
        return p_yes, None
