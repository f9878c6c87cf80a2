"""Rewards in the background: one thread for each reward works while the next batch is being sampled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator

from paco_grpo.training.processes import any_process, gather_rows
from paco_grpo.types import Item

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.rewards.registry import Reward

_POLL_SECONDS = 0.5


class ScoringError(RuntimeError):
    """A reward raised an exception; the message names the reward."""


class ScoringQueue:
    """Collects the scores of images that are handed in batch by batch.

    A reward sees its batches one after the other and in order (so it needs not be thread-safe), different rewards run
    beside each other and beside the sampling.

    Args:
        rewards: Short name → callable(images, items).
        batch_size: Images per call; None = as handed in.
    """

    def __init__(self, rewards: Mapping[str, Reward], batch_size: int | None = None) -> None:
        self.rewards, self.batch_size = dict(rewards), batch_size
        self.wait_seconds = 0.0
        self._busy_seconds = dict.fromkeys(self.rewards, 0.0)
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}") for name in self.rewards}
        self._pending: list[tuple[np.ndarray, dict[str, Future]]] = []

    def submit(self, images: Sequence[Image.Image], items: Sequence[Item], rows: Sequence[int]) -> None:
        """Start scoring ``images``; their scores go to ``rows`` of the result."""
        size = self.batch_size or max(1, len(images))
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            futures = {
                name: self._threads[name].submit(self._score, name, images[part], items[part]) for name in self.rewards
            }
            self._pending.append((np.asarray(rows[part]), futures))

    def _score(self, name: str, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        started = time.perf_counter()
        try:
            return self.rewards[name](images, items)
        finally:
            self._busy_seconds[name] += time.perf_counter() - started

    @property
    def hidden_share(self) -> float:
        """Of the time of the slowest reward, how much passed while the caller did something else than wait for it, in
        [0, 1]; NaN where rewards took no time. Call it after ``results``."""
        busy = max(self._busy_seconds.values(), default=0.0)
        return max(0.0, 1.0 - self.wait_seconds / busy) if busy > 0 else math.nan

    def results(self, count: int, should_stop: Callable[[], bool] = lambda: False) -> np.ndarray | None:
        """Wait for everything submitted.

        Args:
            count: Rows of the result.
            should_stop: Asked twice a second while waiting.

        Returns:
            (count, number of rewards) float64 in the order of ``rewards``, NaN = missing; None when asked to stop.

        Raises:
            ScoringError: A reward raised; its exception is the cause.
        """
        started = time.perf_counter()
        scores = np.full((count, len(self.rewards)), math.nan)
        for rows, futures in self._pending:
            for column, name in enumerate(self.rewards):
                while not futures[name].done():
                    if should_stop():
                        return None
                    wait([futures[name]], timeout=_POLL_SECONDS)
                problem = futures[name].exception()
                if problem is not None:
                    raise ScoringError(f"{name}: {type(problem).__name__}: {problem}") from problem
                scores[rows, column] = futures[name].result()
        self._pending.clear()
        self.wait_seconds = time.perf_counter() - started
        return scores

    def gathered(
        self, accelerator: Accelerator, local: int, total: int, should_stop: Callable[[], bool]
    ) -> np.ndarray | None:
        """Scores of all processes; every process calls it and all come to the same end.

        Args:
            accelerator: Process r of P handed in the images r, r + P, … of ``total``.
            local: Images of this process.
            total: Images of all.
            should_stop: Whether this process was asked to stop.

        Returns:
            (total, number of rewards) float64, NaN = missing; None when a process was asked to stop.

        Raises:
            ScoringError: A reward raised on at least one process.
        """
        scores, problem = None, None
        try:
            scores = self.results(local, should_stop)
        except ScoringError as error:
            problem = error
        if any_process(accelerator, scores is None and problem is None):
            return None
        if any_process(accelerator, problem is not None):
            raise problem or ScoringError("a reward failed on another process, see its message")
        return gather_rows(accelerator, scores, total)

    def failed(self) -> bool:
        """Whether a reward has already raised (then waiting for more images is pointless)."""
        return any(f.done() and f.exception() is not None for _, futures in self._pending for f in futures.values())

    def abandon(self) -> None:
        """Forget what was submitted; batches not yet begun are never scored."""
        for _, futures in self._pending:
            for future in futures.values():
                future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the threads without waiting for what was abandoned."""
        self.abandon()
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)
