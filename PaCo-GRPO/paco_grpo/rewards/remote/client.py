"""A reward that runs in another process: the client of ``paco_grpo.rewards.remote.service``."""

import json
import logging
import math
import os
import time
from collections.abc import Sequence

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.registry import RewardError
from paco_grpo.rewards.remote.wire import decode_scores, encode_request
from paco_judge import transport

logger = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 10.0


class RemoteReward:
    """Sends images and items to a reward service and returns its scores.

    If the service does not answer within the deadline, the scores of that request are missing. If
    it refuses a request, or its reward raises, that is an error, as it would be in this process.

    Args:
        name: The reward that the service must serve.
        server: ``http://HOST:PORT``.
        api_key: Default: the environment's REWARD_SERVICE_KEY, which keeps it out of options and
            files.
        deadline_s: Seconds for one request, retries after connection errors included.
        request_size: Images in one request.
    """

    def __init__(
        self,
        name: str,
        server: str,
        api_key: str | None = None,
        deadline_s: float = 600.0,
        request_size: int = 16,
    ) -> None:
        self.name = name
        self.server = server.rstrip("/")
        self.deadline_s = deadline_s
        self.request_size = request_size
        self._headers = transport.json_headers(api_key or os.environ.get("REWARD_SERVICE_KEY"))

    def check(self) -> None:
        """Raises RewardError: The service serves another reward, or nothing."""
        where = f"reward {self.name!r}: the service at {self.server}"
        try:
            deadline = time.monotonic() + _CHECK_TIMEOUT_S
            address = f"{self.server}/health"
            health = transport.run(transport.request("GET", address, self._headers, deadline))
            served = json.loads(health)["reward"]
        except transport.NoAnswer as error:
            hint = (
                f"start one with `bash scripts/reward_service.sh {self.name} --port PORT`, "
                "or correct server= (the address of a judge is base_url=)"
            )
            if error.status == 401:
                hint = "set REWARD_SERVICE_KEY or api_key to its key"
            raise RewardError(f"{where} does not answer: {error}; {hint}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise RewardError(f"{where} is not a reward service: {error!r}") from error
        if served != self.name:
            raise RewardError(f"{where} serves {served!r}; correct server=")

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing. Raises RewardError."""
        scores = np.full(len(images), math.nan)
        address = f"{self.server}/score"
        for start in range(0, len(images), self.request_size):
            part = slice(start, start + self.request_size)
            count = len(images[part])
            body = encode_request(images[part], items[part])
            deadline = time.monotonic() + self.deadline_s
            try:
                answer = transport.run(transport.post(address, self._headers, body, deadline))
                scores[part] = decode_scores(answer, count)
            except transport.NoAnswer as error:
                if error.status is not None:
                    raise RewardError(f"reward {self.name!r} at {self.server}: {error}") from error
                logger.warning(
                    "reward %s: %d scores are missing: %s: %s", self.name, count, self.server, error
                )
            except ValueError as error:
                raise RewardError(f"reward {self.name!r} at {self.server}: {error}") from error
        return scores
