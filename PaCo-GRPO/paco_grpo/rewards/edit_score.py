"""edit_score: the EditScore judge of edits (arXiv 2509.23909, PyPI ``editscore``), over an OpenAI-compatible server.

Prompts and reading of answers are the package's; asking is ours, because the package fills in a middle score where an
answer cannot be read, and a missing score must stay missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paco_grpo.rewards.editing import reference_of
from paco_judge import transport
from paco_judge.client import JudgeClient
from paco_judge.images import png_data_url

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

logger = logging.getLogger(__name__)

MODEL = "EditScore-7B"
_TOKENS = 1024  # reasons come before the scores


@dataclass(frozen=True)
class Settings:
    """How EditScore is asked."""

    score_range: int
    num_pass: int
    temperature: float
    seed: int
    max_concurrency: int
    deadline_s: float


class EditScore:
    """sqrt(min of the two edit scores · min of the two quality scores) / score_range, averaged over passes."""

    def __init__(self, client: JudgeClient, api_key: str | None, settings: Settings) -> None:
        from editscore import vie_prompts
        from editscore.json_parser import parse_vlm_output_to_dict

        self.client, self.settings, self._parse = client, settings, parse_vlm_output_to_dict
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        upper, context = str(settings.score_range), vie_prompts._context_no_delimit_reasoning_first
        rules = (context, vie_prompts._prompts_0shot_two_image_edit_rule, vie_prompts._prompts_0shot_tie_rule_SC)
        self._edit_prompt = "\n".join([*rules[:2], rules[2].replace("10", upper)])
        self._quality_prompt = "\n".join([context, vie_prompts._prompts_0shot_rule_PQ.replace("10", upper)])

    def check(self) -> None:
        """Ask the server which models it has.

        Raises:
            JudgeError: It does not answer or lacks the model.
        """
        self.client.check()

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1], NaN = missing (no answer, or one that does not hold two scores in range).

        Raises:
            ValueError: An item has no reference image.
        """
        model = self.client.check()
        questions = []
        for image, item in zip(images, items, strict=True):
            reference, edited = png_data_url(reference_of(item, "edit_score")), png_data_url(image)
            text = self._edit_prompt.replace("<instruction>", item.prompt)
            for number in range(self.settings.num_pass):
                questions.append(self._body(model, [reference, edited], text, number))
                questions.append(self._body(model, [edited], self._quality_prompt, number))
        answers = transport.runtime().submit(self._ask_all(questions)).result()
        scores = [self._lowest(answer) for answer in answers]
        overall = np.array([math.nan if None in pair else math.sqrt(pair[0] * pair[1]) for pair in _couples(scores)])
        return overall.reshape(len(images), self.settings.num_pass).mean(axis=1)

    def _body(self, model: str, urls: list[str], text: str, number: int) -> bytes:
        content: list[dict[str, Any]] = []
        for index, url in enumerate(urls, start=1):  # the numbering that EditScore was trained with
            content.append({"type": "text", "text": f"<img{index}>: "})
            content.append({"type": "image_url", "image_url": {"url": url}})
        content.append({"type": "text", "text": text})
        request = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": _TOKENS,
            "temperature": self.settings.temperature,
            "seed": self.settings.seed + number,
        }
        return json.dumps(request).encode()

    async def _ask_all(self, bodies: list[bytes]) -> list[str | None]:
        runtime = transport.runtime()
        slots = asyncio.Semaphore(self.settings.max_concurrency)
        deadline = runtime.loop.time() + self.settings.deadline_s
        url = f"{self.client.base_url}/v1/chat/completions"

        async def ask(body: bytes) -> str | None:
            try:
                async with slots:
                    answer = await runtime.post(url, self._headers, body, deadline)
                return json.loads(answer)["choices"][0]["message"]["content"]
            except (transport.Refused, transport.Unreachable, ValueError, KeyError, IndexError, TypeError) as error:
                logger.warning("edit_score: no answer from %s: %s", url, error)
                return None

        return await asyncio.gather(*map(ask, bodies))

    def _lowest(self, answer: str | None) -> float | None:
        """The lower of the two scores of an answer, in [0, 1]; None if it does not hold two scores in range."""
        try:
            scores = self._parse(answer)["score"] if answer else []
        except (ValueError, TypeError):  # scores that are no numbers
            scores = []
        if len(scores) != 2 or not all(0 <= score <= self.settings.score_range for score in scores):
            if answer:
                logger.warning("edit_score: this answer holds no two scores in range: %.200r", answer)
            return None
        return min(scores) / self.settings.score_range


def _couples(scores: list[float | None]) -> list[tuple[float | None, float | None]]:
    return list(zip(scores[::2], scores[1::2], strict=True))


def edit_score(
    base_url: str = "http://127.0.0.1:8000",
    model: str = MODEL,
    api_key: str | None = None,
    score_range: int = 25,
    num_pass: int = 1,
    temperature: float = 0.7,
    seed: int = 42,
    max_concurrency: int = 32,
    deadline_s: float = 600.0,
) -> EditScore:
    """EditScore over an OpenAI-compatible server (``VLLM_MODEL_PATHS=…EditScore-7B bash vllm_server/launch.sh``).

    Args:
        base_url: Of the server.
        model: Served name.
        api_key: If the server wants one.
        score_range: Upper end of the scale that the model was trained with.
        num_pass: Answers that are averaged.
        temperature: Of the answers, as the package sets it.
        seed: Of the first pass; the next ones count up.
        max_concurrency: Requests in flight.
        deadline_s: Seconds until an answer counts as missing.

    Raises:
        ImportError: editscore is not installed here (``pip install 'paco-grpo[editscore]'``).
    """
    settings = Settings(score_range, num_pass, temperature, seed, max_concurrency, deadline_s)
    return EditScore(JudgeClient(base_url, model, api_key=api_key), api_key, settings)
