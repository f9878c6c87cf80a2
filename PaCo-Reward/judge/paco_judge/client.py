"""Scoring pairs of images over an OpenAI-compatible server.

judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
verdicts = judge.score([Pair(image_a, image_b, question)])
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from paco_judge import transport
from paco_judge.errors import UserError
from paco_judge.identity import served_identity
from paco_judge.images import UnreadableImage, data_url
from paco_judge.questions import DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import (
    TOP_LOGPROBS,
    Answer,
    Verdict,
    read_logprobs,
    verdict_from_top_logprobs,
)

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"  # of a server with several models
MODELS_TIMEOUT_S = 10.0
FIRST_ANSWER_S = 120.0
Choice = dict[str, Any] | str  # of a server's answer, or why there is none
SCORING = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}


class JudgeClient:
    """Asks one model of one server; usable from several threads at once.

    Args:
        base_url: With or without a trailing ``/v1``.
        model: Served name, in upper or lower case: published guides write it in two ways. None:
            ``DEFAULT_MODEL``, or the only model of the server.
        api_key: Sent as a bearer token. Default: the environment's VLLM_API_KEY.
        max_concurrency: Requests in flight.
        deadline_s: Seconds for a whole ``score``, retries included.
        form: How images are labeled and encoded, and which tokens count as Yes and No.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        *,
        api_key: str | None = None,
        max_concurrency: int = 64,
        deadline_s: float = 600.0,
        form: RequestForm = DEFAULT_FORM,
    ):
        if max_concurrency < 1:  # else every question would wait for ever
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.form = form
        self.deadline_s = deadline_s
        self._headers = transport.json_headers(api_key or os.environ.get("VLLM_API_KEY"))
        self._served: str | None = None
        self._rows: list[dict[str, Any]] = []  # of the server's /v1/models
        self._slots = asyncio.Semaphore(max_concurrency)

    def check(self) -> str:
        """The served name of the model; the server is asked once. Raises UserError."""
        if self._served is not None:
            return self._served
        self._rows = self._list_models()
        served = [row["id"] for row in self._rows]
        wanted = self.model or DEFAULT_MODEL
        alike = [name for name in served if name.casefold() == wanted.casefold()]
        if alike:
            self._served = wanted if wanted in alike else alike[0]
            if self._served != wanted:
                logger.warning("model %r is served as %r, which is asked", wanted, self._served)
            return self._served
        if self.model is None and len(served) == 1:
            self._served = served[0]
            logger.info("the judge at %s is its only model, %r", self.base_url, self._served)
            return self._served
        names = ", ".join(map(repr, served)) or "nothing"
        raise UserError(
            f"the judge at {self.base_url} does not serve {wanted!r}; it serves {names}. Name one of "
            "them: --model NAME, or in Python and in arguments of a reward model=NAME"
        )

    def identity(self) -> str | None:
        """Whose scores these are (``paco_judge.identity``); None: the server does not say.

        Raises UserError: There is no server, or another model.
        """
        served = self.check()
        (row,) = (row for row in self._rows if row["id"] == served)
        return served_identity(row, self._rows, self.base_url)

    def _list_models(self) -> list[dict[str, Any]]:
        url = f"{self.base_url}/v1/models"
        deadline = time.monotonic() + MODELS_TIMEOUT_S
        try:
            answer = transport.run(transport.request("GET", url, self._headers, deadline))
            return [row | {"id": str(row["id"])} for row in json.loads(answer)["data"]]
        except transport.NoAnswer as error:
            if error.status in (401, 403):
                raise UserError(
                    f"the judge at {self.base_url} refuses the API key ({error}); give its "
                    "key in the environment variable VLLM_API_KEY, or as the argument api_key"
                ) from error
            raise UserError(
                f"no judge answers at {url}: {error}; start one (in PaCo-GRPO: `bash "
                "vllm_server/launch.sh`), or correct the address"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{url} does not answer like an OpenAI-compatible server: {error!r}"
            ) from error

    def prove(self, pair: Pair, writes: bool = False) -> None:
        """Ask one pair before a long run: a server may list its models and answer no question.

        Args:
            writes: The run reads whole answers: one token must come back, but not Yes or No.

        Raises:
            UserError: No P(Yes) within ``FIRST_ANSWER_S`` or ``deadline_s``, whichever is shorter.
        """
        seconds = min(self.deadline_s, FIRST_ANSWER_S)
        fields = {"temperature": 0, "max_tokens": 1} if writes else SCORING
        (choice,) = self._ask([pair], fields, time.monotonic() + seconds)
        error = (_answer(choice) if writes else self._verdict(choice)).error
        if error is not None:
            raise UserError(
                f"the judge {self._served} at {self.base_url} gave no usable answer to a first question "
                f"about images: {error}. Look at its log, or ask another model"
            )

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order.

        Raises UserError: The first call found no server, or another model.
        """
        choices = self._ask(pairs, SCORING, time.monotonic() + self.deadline_s)
        return list(map(self._verdict, choices))

    def first_tokens(self, pairs: Sequence[Pair]) -> list[list[tuple[str, float]] | None]:
        """The likeliest first tokens of each answer, and their log-probabilities, in order.

        None, with a line in the log, if there are none. Raises UserError.
        """
        tokens: list[list[tuple[str, float]] | None] = []
        for choice in self._ask(pairs, SCORING, time.monotonic() + self.deadline_s):
            try:
                top = choice["logprobs"]["content"][0]["top_logprobs"]
                tokens.append(read_logprobs(top))
            except (ValueError, LookupError, TypeError) as error:
                logger.warning("no tokens (%s): %.500s", error, choice)
                tokens.append(None)
        return tokens

    def generate(self, pairs: Sequence[Pair], max_tokens: int, **sampling: float) -> list[Answer]:
        """The whole answer to each pair, in order. Raises UserError.

        ``deadline_s`` is for each answer. ``sampling``: such as ``seed``; greedy by default.
        """
        fields = {"temperature": 0, "max_tokens": max_tokens} | sampling
        return list(map(_answer, self._ask(pairs, fields, None)))

    def _verdict(self, choice: Choice) -> Verdict:
        """P(Yes) of a choice, or why there is none."""
        if isinstance(choice, str):
            return Verdict(None, choice)
        try:
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            return verdict_from_top_logprobs(top, self.form.answer_tokens)
        except (LookupError, TypeError) as error:
            if isinstance(choice, dict) and not choice.get("logprobs"):
                return Verdict(
                    None,
                    "the server returns no top_logprobs, of which the score is made; vLLM does",
                )
            return Verdict(None, _unreadable(error, choice))

    def _ask(
        self, pairs: Sequence[Pair], fields: dict[str, Any], deadline: float | None
    ) -> list[Choice]:
        """The server's choice for each pair, or why there is none. Raises UserError."""
        address = f"{self.base_url}/v1/chat/completions"
        fields = {"model": self.check()} | fields
        encoding: dict[int, asyncio.Task] = {}  # an image is encoded once, in however many pairs

        async def ask(pair: Pair) -> Choice:
            for image in pair.images:
                if id(image) not in encoding:
                    task = asyncio.to_thread(data_url, image, self.form.image_format)
                    encoding[id(image)] = asyncio.create_task(task)
            try:
                # Of several that fail, asyncio would report all but the first at some later time.
                urls = await asyncio.gather(*[encoding[id(image)] for image in pair.images])
            except UnreadableImage as error:
                return str(error)
            async with self._slots:
                end = deadline or time.monotonic() + self.deadline_s
                if time.monotonic() >= end:
                    return "not asked within the time of the whole call (deadline_s)"
                messages = build_messages(urls, pair.question, self.form)
                body = json.dumps({"messages": messages} | fields).encode()
                try:
                    answer = await transport.post(address, self._headers, body, end)
                except transport.NoAnswer as error:
                    return f"judge at {self.base_url}: {error}"
            try:
                return json.loads(answer)["choices"][0]
            except (ValueError, LookupError, TypeError) as error:
                return _unreadable(error, answer)

        async def ask_all() -> list[Choice]:
            order = asking_order(pairs)
            answers = await asyncio.gather(*[ask(pairs[number]) for number in order])
            choices = dict(zip(order, answers, strict=True))
            return [choices[number] for number in range(len(pairs))]

        return transport.run(ask_all())


def asking_order(pairs: Sequence[Pair]) -> list[int]:
    """The numbers of ``pairs`` in the order of sending: those with the same last image together.

    vLLM caches the beginning of many questions, with their first images. But of the images after
    it, it caches only as many as fit into one of its steps, so they are better used at once.
    """
    places: dict[int, int] = {}  # of each last image (by ``id``), in order of appearance
    for pair in pairs:
        places.setdefault(id(pair.images[-1]), len(places))
    return sorted(range(len(pairs)), key=lambda number: places[id(pairs[number].images[-1])])


def _answer(choice: Choice) -> Answer:
    """The text of a choice, or why there is none."""
    if isinstance(choice, str):
        return Answer(None, choice)
    try:
        return Answer(choice["message"]["content"] or "")
    except (LookupError, TypeError) as error:
        return Answer(None, _unreadable(error, choice))


def _unreadable(error: Exception, answer: Any) -> str:
    shown = f"{type(error).__name__}: {error}"
    return f"the judge's answer cannot be read ({shown}): {str(answer)[:200]}"
