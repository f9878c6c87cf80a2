"""A reward that runs in another process: the client side of ``paco_grpo.rewards.service``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paco_grpo.rewards.errors import RewardError
from paco_grpo.rewards.wire import WireError, decode_scores, encode_request
from paco_judge import transport

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 10.0


class RemoteReward:
    """Sends images and items to a reward service and returns its scores.

    A service that does not answer within the deadline makes the scores of that request missing (NaN); one that refuses
    a request, or whose reward raises, is an error, as it would be in this process.

    Args:
        name: Of the reward, which the service must serve.
        server: ``http://HOST:PORT``.
        api_key: If the service wants one.
        deadline_s: Seconds for one request, tries after connection errors included.
        request_size: Images in one request.
    """

    def __init__(
        self, name: str, server: str, api_key: str | None = None, deadline_s: float = 600.0, request_size: int = 16
    ) -> None:
        if request_size < 1 or deadline_s <= 0:
            raise RewardError(
                f"reward {name!r}: need request_size >= 1 and deadline_s > 0, got {request_size} and {deadline_s}"
            )
        self.name, self.server = name, server.rstrip("/")
        self.deadline_s, self.request_size = deadline_s, request_size
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )

    def check(self) -> None:
        """Ask the service what it serves.

        Raises:
            RewardError: It does not answer, refuses us, or serves another reward; the message says how to start it.
        """
        try:
            body = self._wait(transport.runtime().get(f"{self.server}/health", self._headers, _CHECK_TIMEOUT_S))
            served = json.loads(body)["reward"]
        except transport.Refused as error:
            hint = "; check api_key" if error.status in (401, 403) else ""
            raise RewardError(f"reward {self.name!r}: {self.server} refused us: {error}{hint}") from error
        except transport.Unreachable as error:
            raise RewardError(
                f"reward {self.name!r}: no service answers at {self.server} ({error}); start one with "
                f"`bash scripts/reward_service.sh {self.name} --port PORT`, or correct server="
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(f"reward {self.name!r}: {self.server} is not a reward service: {error!r}") from error
        if served != self.name:
            raise RewardError(f"reward {self.name!r}: the service at {self.server} serves {served!r}; correct server=")

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing.

        Raises:
            RewardError: The service refused the request or its reward failed; the message has the service's words.
        """
        parts = [
            self._ask(images[start : start + self.request_size], items[start : start + self.request_size])
            for start in range(0, len(images), self.request_size)
        ]
        return np.array([score for part in parts for score in part], dtype=np.float64)

    def _ask(self, images: Sequence[Image.Image], items: Sequence[Item]) -> list[float]:
        runtime = transport.runtime()
        body = encode_request(images, items)
        deadline = runtime.loop.time() + self.deadline_s
        try:
            answer = self._wait(runtime.post(f"{self.server}/score", self._headers, body, deadline))
            return decode_scores(answer, len(images))
        except transport.Unreachable as error:
            logger.warning("reward %s: %d scores are missing: %s: %s", self.name, len(images), self.server, error)
            return [math.nan] * len(images)
        except (transport.Refused, WireError) as error:
            raise RewardError(f"reward {self.name!r} at {self.server}: {error}") from error

    @staticmethod
    def _wait(coroutine) -> bytes:
        return transport.runtime().submit(coroutine).result()
