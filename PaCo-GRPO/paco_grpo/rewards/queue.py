"""Rewards in the background: each one scores images in threads of its own while further images are sampled."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.distributed.processes import Stopped
from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward

BATCH_SIZE = 8  # images per call of a reward, unless the configuration says otherwise
_POLL_SECONDS = 0.5
_EXCHANGED = 16  # images that a process sends at a time


class ScoringError(RuntimeError):
    """A reward raised an exception."""


class ScoreQueue:
    """Collects the scores of images that are submitted batch by batch.

    A reward is called from one thread, with ``batch_size`` images (None = 8) at a time. One with ``parallel_calls`` > 1
    gets one image per call, from so many threads. One with ``compares_images`` is called after the sampling, with all
    images of an item; items are spread over the processes, and only ``gathered`` returns its scores.
    """

    def __init__(self, rewards: Mapping[str, Reward], batch_size: int | None = None) -> None:
        self.rewards, self.wait_seconds = dict(rewards), 0.0
        threads = {
            name: getattr(reward, "parallel_calls", 1) for name, reward in self.rewards.items()
        }
        self._sizes = {
            name: 1 if count > 1 else batch_size or BATCH_SIZE for name, count in threads.items()
        }
        self._pools = {
            name: ThreadPoolExecutor(n, thread_name_prefix=f"reward-{name}")
            for name, n in threads.items()
        }
        self._comparing = [
            name
            for name, reward in self.rewards.items()
            if getattr(reward, "compares_images", False)
        ]
        # (row, image, item) that are in no call yet: of each reward, and of those that compare images
        self._waiting = {name: [] for name in self.rewards if name not in self._comparing}
        self._held: list[tuple[int, Image.Image, Item]] = []
        self._calls: dict[Future, tuple[str, np.ndarray]] = {}  # → reward and rows

    def submit(
        self, images: Sequence[Image.Image | None], items: Sequence[Item], rows: Sequence[int]
    ) -> None:
        """Start scoring ``images``, for ``rows`` of the result. An image that is None has no score."""
        present = [entry for entry in zip(rows, images, items, strict=True) if entry[1] is not None]
        for name, waiting in self._waiting.items():
            waiting += present
            while len(waiting) >= self._sizes[name]:
                self._start(name, waiting[: self._sizes[name]])
                del waiting[: self._sizes[name]]
        if self._comparing:
            self._held += present

    def _start(self, name: str, entries: Sequence[tuple[int, Image.Image, Item]]) -> None:
        rows, images, items = zip(*entries, strict=True)
        future = self._pools[name].submit(self._score, name, images, items)
        self._calls[future] = name, np.array(rows, dtype=np.int64)

    def _score(self, name: str, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        # Copies: a reward that paints on its images does not change what others see.
        return self.rewards[name]([image.copy() for image in images], list(items))

    def results(self, count: int, should_stop: Callable[[], bool] = lambda: False) -> np.ndarray:
        """Wait for everything submitted; (count, number of rewards) float64 in the order of ``rewards``, NaN = missing.

        Raises Stopped if ``should_stop``, asked twice a second, answers True; ScoringError if a reward raised.
        """
        started, pending = time.perf_counter(), True
        for name, waiting in self._waiting.items():
            if waiting:
                self._start(name, waiting)
                waiting.clear()
        while pending:
            if should_stop():
                raise Stopped
            done, pending = wait(self._calls, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                if problem := future.exception():
                    name, _ = self._calls[future]
                    raise ScoringError(f"{name}: {type(problem).__name__}: {problem}") from problem
        scores, columns = np.full((count, len(self.rewards)), math.nan), list(self.rewards)
        for future, (name, rows) in self._calls.items():
            scores[rows, columns.index(name)] = future.result()
        self._calls.clear()
        self.wait_seconds += time.perf_counter() - started
        return scores

    def gathered(
        self, accelerator: Accelerator, total: int, should_stop: Callable[[], bool]
    ) -> np.ndarray:
        """``results`` of all processes; a collective operation with the same result, or exception, everywhere.

        Process r of P submitted the images r, r + P, … of ``total`` as its rows 0, 1, …
        """
        scores, processes = np.full((total, len(self.rewards)), math.nan), accelerator.num_processes
        local = len(range(accelerator.process_index, total, processes))
        for rank, rows in enumerate(self._results_everywhere(local, should_stop)):
            scores[rank::processes] = rows
        if self._comparing:
            self._start_comparing(accelerator, total)
            for compared in self._results_everywhere(total, should_stop):
                scores = np.where(np.isnan(compared), scores, compared)
        return scores

    def _results_everywhere(self, count: int, should_stop: Callable[[], bool]) -> list[np.ndarray]:
        """The ``results`` of each process, or on every process the exception of one."""
        scores, problem = None, None
        try:
            scores = self.results(count, should_stop)
        except (ScoringError, Stopped) as error:
            problem = error
        everywhere = gather_object([(scores, isinstance(problem, Stopped), str(problem))])
        if any(stopped for _, stopped, _ in everywhere):
            raise Stopped
        if problem is not None:
            raise problem
        if failed := [message for rows, _, message in everywhere if rows is None]:
            raise ScoringError(f"on another process: {failed[0]}")
        return [rows for rows, _, _ in everywhere]

    def _start_comparing(self, accelerator: Accelerator, total: int) -> None:
        """Exchange the held images so that each item's are on one process, and start scoring."""
        process, processes = accelerator.process_index, accelerator.num_processes
        held = {row * processes + process: (image, item) for row, image, item in self._held}
        groups: dict[int, list[int]] = {}  # item id → positions of its images
        for position, item_id in sorted(
            gather_object([(p, item.item_id) for p, (_, item) in held.items()])
        ):
            groups.setdefault(item_id, []).append(position)
        owners, load = {}, [0] * processes  # of each position
        for positions in groups.values():
            # The owner has the item itself, which need not survive pickling, from an image of its own.
            owner = min({p % processes for p in positions}, key=lambda rank: (load[rank], rank))
            load[owner] += len(positions)
            owners |= dict.fromkeys(positions, owner)
        mine = {p: image for p, (image, _) in held.items() if owners[p] == process}
        step = (
            _EXCHANGED * processes
        )  # all images of an epoch need not fit into the memory of one process
        for start in range(0, total, step):
            sent = [
                (p, held[p][0]) for p in held if start <= p < start + step and owners[p] != process
            ]
            mine |= {p: image for p, image in gather_object(sent) if owners[p] == process}
        for positions in groups.values():
            if owners[positions[0]] == process:
                item = next(held[p][1] for p in positions if p in held)
                for name in self._comparing:
                    self._start(name, [(p, mine[p], item) for p in positions])
        self._held.clear()

    def failed(self) -> bool:
        """Whether a call has already ended with an exception; does not wait."""
        return any(future.done() and future.exception() is not None for future in list(self._calls))

    def close(self) -> None:
        """Drop the calls that have not begun."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
