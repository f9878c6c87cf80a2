"""Questions to a vision-language model over an OpenAI-compatible server, many at a time.

Everything that travels uses paco_judge's event loop, connections and retries.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from paco_judge import transport
from paco_judge.client import JudgeClient, JudgeError
from paco_judge.transport import Refused, Unreachable
from paco_reward.errors import PacoRewardError

logger = logging.getLogger(__name__)

_USELESS_TO_GO_ON = (401, 403, 404)  # what one request is refused with, all will be
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Server:
    """Where a model answers. ``timeout_s``: for one answer, retries included; ``api_key``: sent as a bearer token."""

    url: str
    model: str
    api_key: str | None = None
    max_concurrency: int = 16
    timeout_s: float = 120.0

    def judge(self) -> JudgeClient:
        """A client that asks this model for P(Yes).

        Raises:
            PacoRewardError: the URL is none.
        """
        try:
            return JudgeClient(
                self.url,
                self.model,
                api_key=self.api_key,
                max_concurrency=self.max_concurrency,
                deadline_s=self.timeout_s,
                variants=True,
            )
        except ValueError as error:
            raise PacoRewardError(f"--server: {error}; for example http://127.0.0.1:8000") from error

    def check(self) -> str:
        """The served name of the model.

        Raises:
            PacoRewardError: nothing answers, or it does not serve the model; says which it serves.
        """
        try:
            return self.judge().check()
        except JudgeError as error:
            raise PacoRewardError(f"--server {self.url}, model {self.model}: {error}") from error


class Progress:
    """A line of the log every ten seconds: what is done, what is left."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._started = self._said = time.monotonic()

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S and self.done < self.total:
            return
        self._said = now
        elapsed = now - self._started
        left = elapsed / self.done * (self.total - self.done)
        clock = [str(timedelta(seconds=round(seconds))) for seconds in (elapsed, left)]
        logger.info("%s: %d/%d  elapsed %s  left %s", self.what, self.done, self.total, *clock)


@dataclass(frozen=True)
class Question:
    """``messages`` builds the OpenAI messages when they are needed (images are large as text)."""

    key: str
    messages: Callable[[], list[dict]]


def ask_all(
    server: Server, questions: Sequence[Question], on_answer: Callable[[str, str], None], what: str, max_tokens: int
) -> dict[str, str]:
    """Ask every question once; ``on_answer(key, text)`` is called as answers come, one at a time.

    Returns:
        The questions that the server refused, with its reason; they may be asked again.

    Raises:
        PacoRewardError: the server stopped answering or refuses all; what was answered has been handed over.
    """
    if not questions:
        return {}
    url = server.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    model = server.check()
    headers = {"content-type": "application/json"}
    if server.api_key:
        headers["authorization"] = f"Bearer {server.api_key}"
    progress, refused = Progress(what, len(questions)), {}
    waiting = list(reversed(questions))

    async def worker() -> None:
        runtime = transport.runtime()
        while waiting:
            question = waiting.pop()
            messages = await runtime.loop.run_in_executor(None, question.messages)
            request = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
            deadline = runtime.loop.time() + server.timeout_s
            try:
                answer = _text(await runtime.post(url, headers, json.dumps(request).encode("ascii"), deadline))
                on_answer(question.key, answer)
            except Refused as error:
                if error.status in _USELESS_TO_GO_ON:
                    raise
                refused[question.key] = str(error)
            progress.step()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(server.max_concurrency, len(questions))):
                group.create_task(worker())

    try:
        transport.runtime().submit(work()).result()
    except ExceptionGroup as group:
        expected, others = group.split((Refused, Unreachable))
        if others is not None:
            raise
        raise PacoRewardError(
            f"the server at {server.url} stopped answering ({expected.exceptions[0]}); {progress.done} of "
            f"{len(questions)} answers ({what}) are saved: run the same command again to continue"
        ) from group
    if len(refused) == len(questions):
        raise PacoRewardError(
            f"the server at {server.url} refused all {len(questions)} questions ({what}), first: "
            f"{next(iter(refused.values()))}; is {server.model} a model that takes several images?"
        )
    return refused


def _text(body: bytes) -> str:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Refused(200, f"not the answer of an OpenAI-compatible server: {body[:200]!r}") from error
    return content if isinstance(content, str) else ""
