"""edit_score: the EditScore judge of edits (arXiv 2509.23909, PyPI ``editscore``), over an OpenAI-compatible server.

Prompts and parser are the package's. The requests are ours: the package fills in a middle score where an answer cannot
be read, but a missing score must stay missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paco_grpo.rewards.judge import ServerReward, references_of
from paco_judge import transport
from paco_judge.images import data_url
from paco_judge.json_io import parse
from paco_judge.questions import RequestForm, build_messages

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_TOKENS = 1024  # reasons come before the scores


@dataclass(eq=False)
class EditScore(ServerReward):
    """sqrt(min of the two edit scores · min of the two quality scores) / score_range, averaged over passes.

    Args:
        base_url, model, api_key, host, port, max_concurrency, deadline_s: See ``ServerReward``.
        score_range: Upper end of the scale that the model was trained with.
        num_pass: Answers that are averaged.
        temperature: Sampling temperature, as set by the package.
        seed: Seed of the first pass; each further pass adds 1.
    """

    score_range: int = 25
    num_pass: int = 1
    temperature: float = 0.7
    seed: int = 42
    max_concurrency: int = 32
    default_model = "EditScore-7B"

    def __post_init__(self) -> None:
        from editscore import vie_prompts
        from editscore.json_parser import parse_vlm_output_to_dict

        super().__post_init__()
        self._parse = parse_vlm_output_to_dict
        self._headers = transport.json_headers(self.api_key)
        context, rules = vie_prompts._context_no_delimit_reasoning_first, vie_prompts._prompts_0shot_two_image_edit_rule
        scale = vie_prompts._prompts_0shot_tie_rule_SC.replace("10", str(self.score_range))
        quality = vie_prompts._prompts_0shot_rule_PQ.replace("10", str(self.score_range))
        self._edit_prompt, self._quality_prompt = f"{context}\n{rules}\n{scale}", f"{context}\n{quality}"

    @property
    def parallel_calls(self) -> int:
        """Calls of one image each, which sends two requests a pass, so that ``max_concurrency`` holds."""
        return max(1, self.max_concurrency // (2 * self.num_pass))

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1], NaN = missing. Raises ValueError: An item has no reference image, or several."""
        model = self.client.check()
        requests = []
        for image, item in zip(images, items, strict=True):
            reference, *more = references_of(item, "edit_score")
            if more:
                raise ValueError(
                    f"edit_score compares with one reference image, but item {item.item_id} has {1 + len(more)}: use "
                    "consistency_for_editing"
                )
            edited, text = data_url(image), self._edit_prompt.replace("<instruction>", item.prompt)
            for number in range(self.num_pass):
                requests.append(self._request(model, [data_url(reference), edited], text, number))
                requests.append(self._request(model, [edited], self._quality_prompt, number))
        edit_and_quality = np.array(transport.run(self._ask_all(requests))).reshape(len(images), self.num_pass, 2)
        return np.sqrt(edit_and_quality.prod(axis=2)).mean(axis=1)

    def _request(self, model: str, urls: list[str], text: str, number: int) -> bytes:
        messages = build_messages(urls, text, RequestForm("<img{n}>: "))  # the labels of EditScore's training
        request = {"model": model, "messages": messages, "max_tokens": _TOKENS}
        return json.dumps(request | {"temperature": self.temperature, "seed": self.seed + number}).encode()

    async def _ask_all(self, requests: list[bytes]) -> list[float]:
        slots, deadline = asyncio.Semaphore(self.max_concurrency), time.monotonic() + self.deadline_s
        url = f"{self.client.base_url}/v1/chat/completions"

        async def lowest(request: bytes) -> float:
            """The lower of the two scores of an answer, in [0, 1]; NaN if it does not hold two scores in range."""
            answer = b""
            try:
                async with slots:
                    answer = await transport.post(url, self._headers, request, deadline)
                first, second = map(float, self._parse(parse(answer)["choices"][0]["message"]["content"])["score"])
                if all(0 <= score <= self.score_range for score in (first, second)):  # not true of NaN
                    return min(first, second) / self.score_range
                raise ValueError(f"a score is not in 0 to {self.score_range}")
            except (transport.NoAnswer, ValueError, LookupError, TypeError, AttributeError) as error:
                logger.warning("edit_score: no scores from %s: %s: %.500r", url, error, answer)
                return math.nan

        return await asyncio.gather(*map(lowest, requests))
