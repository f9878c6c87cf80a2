"""A vision-language model behind an OpenAI-compatible server: many questions at a time, retried by paco_judge."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tqdm import tqdm

from paco_judge import transport
from paco_judge.client import JudgeClient, JudgeError, Pair
from paco_judge.json_io import parse
from paco_judge.questions import RequestForm
from paco_judge.transport import Refused, Unreachable
from paco_judge.verdict import Verdict
from paco_reward.errors import PacoRewardError

_REFUSES_ALL = (401, 403, 404)  # an error that every other request would get too
_FORM = RequestForm(answer_tokens="variants")


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable (other users can see command lines); None if no variable is named.

    Raises:
        PacoRewardError: The variable is not set, or a header cannot hold its value.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise PacoRewardError(f"--api_key_env {variable}: this environment variable is not set; export it")
    try:
        transport.json_headers(os.environ[variable])
    except ValueError as error:
        raise PacoRewardError(f"--api_key_env {variable}: {error}") from error
    return os.environ[variable]


@dataclass(frozen=True)
class Server:
    """Where a model is served, and how it is asked for P(Yes).

    ``timeout_s``: for one answer, retries included; ``api_key``: sent as a bearer token.
    """

    url: str
    model: str
    api_key: str | None = None
    max_concurrency: int = 16
    timeout_s: float = 120.0
    form: RequestForm = _FORM

    @cached_property
    def judge(self) -> JudgeClient:
        """A client that asks this model for P(Yes). Raises PacoRewardError for a malformed URL."""
        settings = {"api_key": self.api_key, "max_concurrency": self.max_concurrency, "deadline_s": self.timeout_s}
        try:
            return JudgeClient(self.url, self.model, form=self.form, **settings)
        except ValueError as error:
            raise PacoRewardError(f"--server: {error}; for example http://127.0.0.1:8000") from error

    def check(self) -> str:
        """The served name of the model. Raises PacoRewardError if the server does not answer or does not serve it."""
        try:
            return self.judge.check()
        except JudgeError as error:
            raise PacoRewardError(f"--server {self.url}, model {self.model}: {error}") from error

    def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """P(Yes) or an error for each pair. Raises PacoRewardError as ``check``."""
        try:
            return self.judge.score_blocking(pairs)
        except JudgeError as error:
            raise PacoRewardError(f"--server {self.url}, model {self.model}: {error}") from error


def progress(what: str, total: int) -> tqdm:
    """A bar with the time left, in a log a line every ten seconds."""
    return tqdm(total=total, desc=what, mininterval=0.5 if sys.stderr.isatty() else 10)


def ask_all(
    server: Server,
    questions: Mapping[str, Callable[[], list[dict]]],
    on_answer: Callable[[str, str], None],
    what: str,
    max_tokens: int,
) -> dict[str, str]:
    """Ask every question once.

    Args:
        questions: By key, builders of OpenAI messages (images are large as text).
        on_answer: Called with key and answer as answers arrive, one at a time.
        what: Named in messages.

    Returns:
        The refused questions, with the server's reason.

    Raises:
        PacoRewardError: The server stopped answering, or refuses all; earlier answers were handed over.
    """
    if not questions:
        return {}
    url = server.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    model = server.check()
    headers = transport.json_headers(server.api_key)
    refused: dict[str, str] = {}
    waiting = list(reversed(questions))

    async def worker() -> None:
        runtime = transport.runtime()
        while waiting:
            key = waiting.pop()
            messages = await runtime.loop.run_in_executor(None, questions[key])
            request = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
            deadline = runtime.loop.time() + server.timeout_s
            try:
                on_answer(key, _text(await runtime.post(url, headers, json.dumps(request).encode("ascii"), deadline)))
            except Refused as error:
                if error.status in _REFUSES_ALL:
                    raise
                refused[key] = str(error)
            bar.update()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(server.max_concurrency, len(questions))):
                group.create_task(worker())

    try:
        with progress(what, len(questions)) as bar:
            transport.runtime().submit(work()).result()
    except ExceptionGroup as group:
        expected, others = group.split((Refused, Unreachable))
        if others is not None:
            if own := others.subgroup(PacoRewardError):  # the answer could not be journaled
                raise own.exceptions[0] from group
            raise
        raise PacoRewardError(
            f"the server at {server.url} stopped answering ({expected.exceptions[0]}); {bar.n} of "
            f"{len(questions)} answers ({what}) are saved: run the same command again to continue"
        ) from group
    if len(refused) == len(questions):
        raise PacoRewardError(
            f"the server at {server.url} refused all {len(questions)} questions ({what}), first: "
            f"{next(iter(refused.values()))}; does {server.model} accept several images?"
        )
    return refused


def _text(body: bytes) -> str:
    try:
        content = parse(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Refused(200, f"not the answer of an OpenAI-compatible server: {body[:200]!r}") from error
    return content if isinstance(content, str) else ""
