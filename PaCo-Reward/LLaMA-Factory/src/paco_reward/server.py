"""A vision-language model behind an OpenAI-compatible server: P(Yes) by paco_judge, free text by the openai package."""

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property

from tqdm import tqdm

from paco_judge.client import JudgeClient, Pair
from paco_judge.images import data_url
from paco_judge.questions import RequestForm, build_messages
from paco_reward.errors import PacoRewardError

CONCURRENCY = 16
_OF_ONE_QUESTION = (400, 413, 422, 500)  # HTTP errors that the next question need not get


@dataclass(frozen=True)
class Server:
    """Where a model is served, and how it is asked. ``api_key``: sent as a bearer token."""

    url: str
    model: str
    api_key: str | None
    form: RequestForm

    @classmethod
    def of(cls, args: argparse.Namespace, model: str, form: RequestForm) -> "Server":
        """The server of --server and --api_key_env (other users can see command lines, hence a variable)."""
        key = os.environ.get(args.api_key_env) if args.api_key_env else None
        if args.api_key_env and not key:
            raise PacoRewardError(f"--api_key_env {args.api_key_env}: this environment variable is not set; export it")
        return cls(args.server, model, key, form)

    @cached_property
    def judge(self) -> JudgeClient:
        """Asks for P(Yes). Raises ValueError: the URL or the key is malformed."""
        return JudgeClient(self.url, self.model, api_key=self.api_key, max_concurrency=CONCURRENCY, form=self.form)

    def ask_all(
        self, pairs: Mapping[str, Callable[[], Pair]], on_answer: Callable[[str, str], None], what: str, max_tokens: int
    ) -> dict[str, str]:
        """Ask for the whole answer to every pair's question, several at a time; returns the refused ones and why.

        Args:
            pairs: By key, openers of pairs (images are large).
            on_answer: Called with key and answer as answers arrive, one at a time.
            what: Named in messages.

        Raises:
            JudgeError: The server does not answer, or does not serve the model.
            PacoRewardError: The server stopped answering, or refuses all; earlier answers were handed over.
        """
        if not pairs:
            return {}
        import openai

        served, base_url, refused = self.judge.check(), self.judge.base_url + "/v1", {}
        http = openai.DefaultHttpxClient(trust_env=False)  # servers are near: no proxy
        client = openai.OpenAI(base_url=base_url, api_key=self.api_key or "none", http_client=http)

        def answer(key: str) -> str:
            pair = pairs[key]()
            urls = [data_url(image, self.form.image_format) for image in pair.images]
            messages = build_messages(urls, pair.question, self.form)
            done = client.chat.completions.create(model=served, messages=messages, max_tokens=max_tokens, temperature=0)
            return done.choices[0].message.content or ""

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            futures = {pool.submit(answer, key): key for key in pairs}
            try:
                for future in tqdm(as_completed(futures), what, len(futures)):
                    try:
                        on_answer(futures[future], future.result())
                    except openai.APIStatusError as error:
                        if error.status_code not in _OF_ONE_QUESTION:
                            raise
                        refused[futures[future]] = error.message
            except openai.OpenAIError as error:
                message = f"the server at {self.url} stopped answering ({error}); run the same command again to continue"
                raise PacoRewardError(message) from error
            finally:
                pool.shutdown(cancel_futures=True)
        if refused and len(refused) == len(pairs):
            raise PacoRewardError(f"the server at {self.url} refused all {what}, first: {next(iter(refused.values()))}")
        return refused
