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
from paco_grpo.rewards.remote.wire import decode_scores, encode_request
from paco_judge import transport
from paco_judge.errors import UserError

logger = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 10.0


class RemoteReward:
    """Sends images and items to a reward service and returns its scores.

    If the service does not answer within the deadline, the scores of that request are missing. If
    it refuses a request, or its reward raises, that is an error, as it would be in this process.

    Args:
        name: The reward that the service must serve.
        server: ``http://HOST:PORT``.
        api_key: Default: the environment's REWARD_SERVICE_KEY. No file has it.
        deadline_s: Seconds for one request, retries after connection errors included.
        request_size: Images in one request.
    """

    where = ("server", "deadline_s", "request_size")

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

    def identity(self) -> str | None:
        """Of the reward in the service, arguments included. Raises UserError."""
        self.check()
        return self._identity

    def check(self) -> None:
        """Raises UserError: The service serves another reward, or nothing."""
        address = f"{self.server}/health"
        deadline = time.monotonic() + _CHECK_TIMEOUT_S
        try:
            health = transport.run(transport.request("GET", address, self._headers, deadline))
        except transport.NoAnswer as error:
            hint = (
                f"start one with `bash scripts/reward_service.sh {self.name} --port PORT`, "
                "or correct server= (the address of a judge is base_url=)"
            )
            if error.status == 401:
                hint = (
                    "give its key in the environment variable REWARD_SERVICE_KEY, or as the "
                    "argument api_key"
                )
            raise UserError(f"no service answers at {self.server}: {error}; {hint}") from error
        told = json.loads(health)
        if told["reward"] != self.name:
            raise UserError(
                f"the service at {self.server} serves {told['reward']!r}; correct server="
            )
        self._identity = told.get("identity")  # not of a service of an earlier version

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing. Raises UserError."""
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
            except ValueError as error:
                raise UserError(f"the service at {self.server}: {error}") from error
            except transport.NoAnswer as error:
                if error.status is not None:
                    raise UserError(f"the service at {self.server}: {error}") from error
                logger.warning(
                    "reward %s: %d scores are missing: %s: %s", self.name, count, self.server, error
                )
        return scores
