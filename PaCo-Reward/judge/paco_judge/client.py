"""Scoring pairs of images over an OpenAI-compatible server.

    judge = JudgeClient("http://127.0.0.1:8000", model="PaCo-Reward-7B")
    verdicts = judge.score_blocking([Pair(image_a, image_b, question)])     # from any thread
    verdicts = await judge.score([Pair(image_a, image_b, question)])        # from any event loop

All requests of a process travel through one event loop in a thread of its own, with one connection pool and one cache
(``paco_judge.transport``). A verdict is a probability or an error with its cause; errors are not cached.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from PIL import Image

from paco_judge import transport
from paco_judge.connections import Origin
from paco_judge.images import ImageStore, UnreadableImage
from paco_judge.questions import build_messages
from paco_judge.transport import Refused, Unreachable
from paco_judge.verdict import Verdict, p_yes_from_top_logprobs

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "PaCo-Reward-7B"
_CHECK_TIMEOUT_S = 10.0
_SLOT = "\x00"  # cannot occur in a question: JSON text escapes it


class JudgeError(RuntimeError):
    """The judge cannot be used at all (as opposed to one pair without a score)."""


class JudgeUnavailable(JudgeError):
    """No judge answers at the base URL, or it refuses us."""


class JudgeModelMissing(JudgeError):
    """The judge answers, but does not serve the model asked for."""


@dataclass(frozen=True)
class Pair:
    """Two images and the question asked on them; the order of the images matters. ``image_b`` None: one image alone."""

    image_a: Image.Image
    image_b: Image.Image | None
    question: str

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The images in the order in which they are shown."""
        return (self.image_a,) if self.image_b is None else (self.image_a, self.image_b)


class JudgeClient:
    """Asks one model of one server. Cheap to make: the pool and the cache belong to the process.

    ``base_url``: scheme, host and port, with or without a trailing ``/v1``. ``model``: the served name; one that
    differs only by letter case is taken, and said. ``max_concurrency``: requests of this client in flight.
    ``deadline_s``: the whole of one ``score`` call, retries included, in seconds; a server that nobody could connect
    to for this long is no longer waited for by later calls either, until it answers again. ``variants``: sum the probabilities
    of ``yes``, `` Yes`` … instead of exact ``Yes``/``No``. ``cache``: False asks again for what was asked before.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        model: str = DEFAULT_MODEL,
        *,
        api_key: str | None = None,
        max_concurrency: int = 64,
        deadline_s: float = 600.0,
        variants: bool = False,
        cache: bool = True,
    ):
        Origin.of(base_url)
        if max_concurrency < 1 or deadline_s <= 0:
            raise ValueError(f"need max_concurrency >= 1 and deadline_s > 0, got {max_concurrency} and {deadline_s}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._chat_url = f"{self.base_url}/v1/chat/completions"
        self.model = model
        self.max_concurrency = max_concurrency
        self.deadline_s = deadline_s
        self.variants = variants
        self._cache = cache
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._served: str | None = None
        self._resolving: asyncio.Task | None = None
        self._slots: tuple[object, asyncio.Semaphore] | None = None

    async def score(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict for each pair, in order. Never raises for single pairs.

        The first call asks the server which models it has; raises JudgeUnavailable or JudgeModelMissing if that fails.
        """
        return await asyncio.wrap_future(self._submit(self._score(list(pairs))))

    def score_blocking(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """``score`` for callers without an event loop; usable from any thread, several at once."""
        return self._submit(self._score(list(pairs))).result()

    def check(self) -> str:
        """Ask the server for its models once and return the served name of ours.

        Raises JudgeUnavailable when nothing answers, JudgeModelMissing with the list when the model is not served.
        """
        return self._submit(self._resolve()).result()

    async def check_async(self) -> str:
        """``check`` for callers with an event loop."""
        return await asyncio.wrap_future(self._submit(self._resolve()))

    def _submit(self, coroutine) -> Future:
        runtime = transport.runtime()
        if runtime.is_own_thread():
            coroutine.close()
            raise RuntimeError("the judge client was called from its own event loop thread")
        return runtime.submit(coroutine)

    # Everything below runs on the event loop thread of the process.

    async def _resolve(self) -> str:
        """The served name; callers that come while the server is being asked share its answer."""
        if self._served is None:
            asking = self._resolving
            if asking is None or asking.done() or asking.get_loop() is not asyncio.get_running_loop():
                asking = self._resolving = asyncio.ensure_future(self._served_name())
            self._served = await asyncio.shield(asking)
        return self._served

    async def _served_name(self) -> str:
        return _pick_name(self.model, await self._served_names(), self.base_url)

    async def _served_names(self) -> list[str]:
        url = f"{self.base_url}/v1/models"
        try:
            body = await transport.runtime().get(url, self._headers, _CHECK_TIMEOUT_S)
            return [str(entry["id"]) for entry in json.loads(body)["data"]]
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

    async def _score(self, pairs: list[Pair]) -> list[Verdict]:
        runtime = transport.runtime()
        deadline = runtime.loop.time() + self.deadline_s
        model = await self._resolve()
        store = ImageStore()
        digests = await asyncio.gather(*(self._digests(store, pair) for pair in pairs))
        wanted: dict[tuple, tuple[tuple[bytes, ...], str]] = {}
        keys: list[tuple | UnreadableImage] = []
        for pair, digest in zip(pairs, digests, strict=True):
            if isinstance(digest, UnreadableImage):
                keys.append(digest)
                continue
            key = (self.base_url, model, self.variants, pair.question, *digest)
            keys.append(key)
            wanted.setdefault(key, (digest, pair.question))
        answers = await self._ask_all(wanted, store, model, deadline)
        return [Verdict(None, str(key)) if isinstance(key, UnreadableImage) else answers[key] for key in keys]

    async def _digests(self, store: ImageStore, pair: Pair) -> tuple[bytes, ...] | UnreadableImage:
        try:
            return tuple([await store.digest(image) for image in pair.images])
        except UnreadableImage as error:
            return error

    async def _ask_all(self, wanted: dict, store: ImageStore, model: str, deadline: float) -> dict[tuple, Verdict]:
        """Answer each distinct pair from the cache, from a request already under way, or by asking."""
        cache = transport.runtime().cache
        answers: dict[tuple, Verdict] = {}
        todo = []
        for key, parts in wanted.items():
            cached = cache.get(key) if self._cache else None
            if cached is not None:
                answers[key] = Verdict(cached)
            else:
                todo.append((key, parts))
        todo.reverse()  # popped from the end: asked in the order given
        bodies = _Bodies(model)

        async def worker():
            while todo:
                key, parts = todo.pop()
                answers[key] = await self._ask_once(key, parts, bodies, store, deadline)

        await asyncio.gather(*(worker() for _ in range(min(self.max_concurrency, len(todo)))))
        return answers

    async def _ask_once(self, key: tuple, parts, bodies: "_Bodies", store: ImageStore, deadline: float) -> Verdict:
        """Ask, unless another batch of this process is asking the same right now."""
        runtime = transport.runtime()
        under_way = runtime.under_way.get(key)
        if under_way is not None:
            shared = await under_way
            if shared.ok or runtime.loop.time() >= deadline:
                return shared
        own = runtime.loop.create_future()
        runtime.under_way[key] = own
        verdict = Verdict(None, "the request was abandoned")
        try:
            verdict = await self._ask(parts, bodies, store, deadline)
            if verdict.ok and self._cache:
                runtime.cache.put(key, verdict.p_yes)
            return verdict
        finally:
            own.set_result(verdict)
            if runtime.under_way.get(key) is own:
                del runtime.under_way[key]

    async def _ask(self, parts, bodies: "_Bodies", store: ImageStore, deadline: float) -> Verdict:
        digests, question = parts
        try:
            body = bodies.build([await store.url(digest) for digest in digests], question)
        except UnreadableImage as error:
            return Verdict(None, str(error))
        runtime = transport.runtime()
        try:
            async with self._semaphore(runtime):
                answer = await runtime.post(self._chat_url, self._headers, body, deadline, self.deadline_s)
            return _read_answer(answer, self.variants)
        except (Refused, Unreachable) as error:
            return Verdict(None, f"judge at {self.base_url}: {error}")

    def _semaphore(self, runtime) -> asyncio.Semaphore:
        if self._slots is None or self._slots[0] is not runtime:  # another runtime: we were forked
            self._slots = (runtime, asyncio.Semaphore(self.max_concurrency))
        return self._slots[1]


class _Bodies:
    """Request bodies put together from prebuilt strings: only the question and the urls differ between pairs."""

    def __init__(self, model: str):
        self._model = model
        self._around: dict[int, list[str]] = {}  # number of images -> what stands before, between and after the slots
        self._texts: dict[tuple[int, str], str] = {}

    def build(self, image_urls: Sequence[str], question: str) -> bytes:
        count = len(image_urls)
        head, *between, before_text, tail = self._pieces(count)
        text = self._texts.get((count, question))
        if text is None:
            text = self._texts[count, question] = before_text + json.dumps(question)[1:-1] + tail
        shown = "".join(url + piece for url, piece in zip(image_urls, [*between, ""], strict=True))
        return f"{head}{shown}{text}".encode("ascii")

    def _pieces(self, count: int) -> list[str]:
        if count not in self._around:
            request = {
                "model": self._model,
                "messages": build_messages(_SLOT, _SLOT if count == 2 else None, _SLOT),
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 20,
            }
            self._around[count] = json.dumps(request).split(json.dumps(_SLOT)[1:-1])
        return self._around[count]


def _pick_name(wanted: str, served: list[str], base_url: str) -> str:
    if wanted in served:
        return wanted
    alike = [name for name in served if name.casefold() == wanted.casefold()]
    if len(alike) == 1:
        logger.warning(
            "judge at %s serves %r; taken for %r, which differs only by letter case", base_url, *alike, wanted
        )
        return alike[0]
    listed = ", ".join(repr(name) for name in served) or "nothing"
    raise JudgeModelMissing(
        f"the judge at {base_url} does not serve {wanted!r}; it serves {listed}. Ask for one of these, or launch the "
        f"server with VLLM_MODEL_NAMES={wanted}"
    )


def _read_answer(body: bytes, variants: bool) -> Verdict:
    try:
        top = json.loads(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        p_yes = p_yes_from_top_logprobs(top, variants)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Verdict(None, f"the judge's answer cannot be read ({error!r}): {body[:200]!r}")
    if p_yes is None:
        tokens = [str(entry["token"]) for entry in top[:5]]
        return Verdict(None, f"neither Yes nor No is among the judge's top {len(top)} tokens (first: {tokens})")
    return Verdict(p_yes)
