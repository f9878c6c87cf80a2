"""Rewards in the background: they score images while further ones are sampled.

All images of an item are brought to one process for rewards that compare them. If people give such
a reward, the queue waits for them, for hours if need be.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.distributed import Shares, Stopped, any_process, interleave
from paco_grpo.item import Item
from paco_grpo.monitoring.progress import progress
from paco_grpo.rewards.contract import Reward

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_SENT_AT_ONCE = 16  # images of each process: all of an epoch need not fit into one process's memory


class ScoringError(RuntimeError):
    """A reward raised an exception."""


class Submission(NamedTuple):
    """An image to score."""

    row: int  # of its scores in what ``ScoreQueue.results`` returns next
    image: Image.Image
    item: Item
    seed: int  # of its noise


class Lane:
    """The threads and waiting images of one reward.

    A reward is called from one thread, with ``batch_size`` images at a time. One with
    ``parallel_calls`` > 1 gets one image per call, from so many threads. One with
    ``compares_images`` gets all images of an item in one call. If one that is only ``watched``
    raises, that is a warning, and the images of the call have no score.
    """

    def __init__(
        self, name: str, reward: Reward, batch_size: int, watched: bool, epoch: int | None
    ) -> None:
        threads = reward.parallel_calls
        self.name = name
        self.watched = watched
        self.has_failed = False  # and a warning has said so
        self.reward = reward
        self.epoch = epoch
        self.batch_size = batch_size if threads == 1 else 1
        self.waiting: list[Submission] = []
        self.calls: dict[Future[Any], list[int]] = {}  # → rows of the result
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"reward-{name}")

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take in images, and start a call for each full batch."""
        self.waiting += submissions
        while len(self.waiting) >= self.batch_size:
            batch = self.waiting[: self.batch_size]
            del self.waiting[: self.batch_size]
            self.start(batch)

    def flush(self) -> None:
        """Start a call with the images that wait for a full batch."""
        if self.waiting:
            self.start(self.waiting)
            self.waiting = []

    def start(self, batch: Sequence[Submission]) -> None:
        """Start one call."""
        future = self._pool.submit(self._call, self.reward, list(batch))
        self.calls[future] = [submission.row for submission in batch]

    def show(self, batch: Sequence[Submission]) -> None:
        """Start to show people all images of an item, which gives no scores."""
        future = self._pool.submit(self._call, self.reward.show, list(batch))
        self.calls[future] = []

    def _call(self, function: Callable[..., Any], batch: Sequence[Submission]) -> Any:
        # Copies: a reward may paint on its images, and others must not see it.
        images = [submission.image.copy() for submission in batch]
        items = [submission.item for submission in batch]
        seeds = [submission.seed for submission in batch]
        try:
            return function(images, items, seeds, self.epoch)
        except Exception as error:
            if not self.watched:
                raise
            if not self.has_failed:
                self.has_failed = True
                logger.warning(
                    "%s has weight 0 and failed, so images have no score by it (%s: %s)",
                    self.name,
                    type(error).__name__,
                    error,
                )
            return np.full(len(images), math.nan)

    def close(self) -> None:
        """Drop the calls that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ScoreQueue:
    """Collects the scores of images that are submitted batch by batch.

    Rewards that compare images are called after the sampling. Items are spread over the processes
    for them, and only ``gathered`` returns their scores.

    Attributes:
        rewards: By name, in the order of the result's columns.
        wait_seconds: Time that ``results`` has waited.
        people_seconds: Time that people have taken.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        batch_size: int = 8,
        watched: Collection[str] = (),
        epoch: int | None = None,
    ) -> None:
        """The queue of some images.

        Args:
            rewards: By name.
            batch_size: Images per call.
            watched: Rewards that nothing depends on.
            epoch: That the images are of, for rewards that ask for it; None outside of a training.
        """
        self.rewards = dict(rewards)
        self.wait_seconds = 0.0
        self.people_seconds = 0.0
        self._lanes: list[Lane] = []
        for name, reward in rewards.items():
            self._lanes.append(Lane(name, reward, batch_size, name in watched, epoch))
        self._comparing = [lane for lane in self._lanes if lane.reward.compares_images]
        self._to_compare: list[Submission] = []

    def submit(
        self,
        images: Sequence[Image.Image | None],
        items: Sequence[Item],
        numbers: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        """Start scoring ``images``, drawn from ``seeds``. One that is None has no score.

        Their ``numbers`` among the images of this process are the rows of the result.
        """
        submissions: list[Submission] = []
        for number, image, item, seed in zip(numbers, images, items, seeds, strict=True):
            if image is not None:
                submissions.append(Submission(int(number), image, item, seed))
        for lane in self._lanes:
            if not lane.reward.compares_images:
                lane.submit([s for s in submissions if lane.reward.applies_to(s.item)])
        for submission in submissions:
            if any(lane.reward.applies_to(submission.item) for lane in self._comparing):
                self._to_compare.append(submission)

    def results(
        self, count: int, should_stop: Callable[[], bool] = lambda: False, is_main: bool = True
    ) -> np.ndarray:
        """Wait for everything submitted; ``is_main``: and show how far it is.

        Returns:
            (count, number of rewards) float64 in the order of ``rewards``, NaN = missing.

        Raises:
            Stopped: ``should_stop``, asked twice a second, answered True.
            ScoringError: A reward raised.
        """
        started = time.perf_counter()
        for lane in self._lanes:
            lane.flush()
        name_of = {}
        num_scores = {}
        for lane in self._lanes:
            for future, rows in lane.calls.items():
                name_of[future] = lane.name
                num_scores[future] = len(rows)
        pending = set(name_of)
        shown = 0
        with progress("scoring", sum(num_scores.values()), is_main, unit="scores") as show:
            while pending:
                if should_stop():
                    raise Stopped
                # All calls again: one that has failed before ends the waiting at once.
                done, pending = wait(name_of, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    problem = future.exception()
                    if problem is not None:
                        text = f"{name_of[future]}: {type(problem).__name__}: {problem}"
                        raise ScoringError(text) from problem
                num_done = sum(num_scores[future] for future in done)
                show(num_done - shown)
                shown = num_done
        scores = np.full((count, len(self._lanes)), math.nan)
        for column, lane in enumerate(self._lanes):
            for future, rows in lane.calls.items():
                if rows:
                    scores[rows, column] = future.result()
            lane.calls.clear()
        self.wait_seconds += time.perf_counter() - started
        return scores

    def gathered(
        self, accelerator: Accelerator, total: int, should_stop: Callable[[], bool]
    ) -> np.ndarray:
        """``results`` of all processes: a row for each of the ``total`` positions of the epoch.

        This is a collective operation with the same result, or exception, everywhere. First every
        process has rows by number (``Shares``). Then rewards that compare images fill rows by
        position.
        """
        shares = Shares.of(accelerator, total)
        is_main = accelerator.is_main_process
        parts = self._results_everywhere(len(shares.positions), should_stop, is_main)
        scores = interleave(parts)
        if self._comparing:
            self._start_comparisons(accelerator, shares, should_stop)
            # Each image is compared on one process; the others have NaN in its row.
            for compared in self._results_everywhere(total, should_stop, is_main):
                scores = np.where(np.isnan(compared), scores, compared)
        return scores

    def _start_comparisons(
        self, accelerator: Accelerator, shares: Shares, should_stop: Callable[[], bool]
    ) -> None:
        """Call the rewards that compare images, with whole items; their rows are positions."""
        local: dict[int, Submission] = {}
        for submission in self._to_compare:
            position = shares.positions[submission.row]
            local[position] = submission._replace(row=position)
        self._to_compare = []
        groups = list(exchange_images(shares, local))
        if any(lane.reward.asks_people for lane in self._comparing):
            self._ask_people(accelerator, groups, should_stop)
        for of_item in groups:
            for lane in self._comparing:
                if lane.reward.applies_to(of_item[0].item):
                    lane.start(of_item)

    def _ask_people(
        self,
        accelerator: Accelerator,
        groups: Sequence[Sequence[Submission]],
        should_stop: Callable[[], bool],
    ) -> None:
        """Show people this process's groups, and wait until all are answered.

        A collective operation: processes meet twice a second, also those without a group. So none
        waits for another as long as a person takes, and a signal to one of them ends all.
        """
        started = time.perf_counter()
        lanes = [lane for lane in self._comparing if lane.reward.asks_people]
        for of_item in groups:
            for lane in lanes:
                if lane.reward.applies_to(of_item[0].item):
                    lane.show(of_item)
        while True:
            if any_process(accelerator, should_stop()):
                raise Stopped
            if any_process(accelerator, self.failed()):
                break  # the results raise the error
            is_sending = [not future.done() for lane in lanes for future in lane.calls]
            if not any_process(accelerator, any(is_sending)):
                # Only now is everything there that people can be waited for.
                waiting = [lane.reward.is_waiting() for lane in lanes]
                if not any_process(accelerator, any(waiting)):
                    break
            time.sleep(_POLL_SECONDS)
        self.people_seconds += time.perf_counter() - started

    def _results_everywhere(
        self, count: int, should_stop: Callable[[], bool], is_main: bool
    ) -> list[np.ndarray]:
        """The ``results`` of each process, or on every process the exception of one."""
        scores = None
        problem = None
        try:
            scores = self.results(count, should_stop, is_main)
        except (ScoringError, Stopped) as error:
            problem = error
        everywhere = gather_object([(scores, isinstance(problem, Stopped), str(problem))])
        if any(stopped for _, stopped, _ in everywhere):
            raise Stopped
        if problem is not None:
            raise problem
        for rows, _, message in everywhere:
            if rows is None:
                raise ScoringError(f"on another process: {message}")
        return [rows for rows, _, _ in everywhere]

    def failed(self) -> bool:
        """Whether a call has already ended with an exception; does not wait."""
        for lane in self._lanes:
            for future in list(lane.calls):
                if future.done() and future.exception() is not None:
                    return True
        return False

    def close(self) -> None:
        """Drop the calls that have not begun."""
        for lane in self._lanes:
            lane.close()


def exchange_images(shares: Shares, local: Mapping[int, Submission]) -> Iterator[list[Submission]]:
    """The images of each item that this process owns; a collective operation.

    ``local``: the images of this process by their positions, which are their rows.
    """
    local_ids = [(position, image.item.item_id, image.seed) for position, image in local.items()]
    positions_of: dict[int, list[int]] = {}
    seed_of: dict[int, int] = {}
    for position, item_id, seed in sorted(gather_object(local_ids)):
        positions_of.setdefault(item_id, []).append(position)
        seed_of[position] = seed
    # A process with an image of the item scores it: it has the item itself, which need not survive
    # pickling.
    owner_of: dict[int, int] = {}
    for positions in positions_of.values():
        owner_of |= dict.fromkeys(positions, shares.owner(positions[0]))

    images: dict[int, Image.Image] = {}
    for position, submission in local.items():
        if owner_of[position] == shares.process:
            images[position] = submission.image
    stride = _SENT_AT_ONCE * shares.processes
    for start in range(0, shares.total, stride):
        sent: list[tuple[int, Image.Image]] = []
        for position in range(start, start + stride):
            if position in local and owner_of[position] != shares.process:
                sent.append((position, local[position].image))
        for position, image in gather_object(sent):
            if owner_of[position] == shares.process:
                images[position] = image

    for positions in positions_of.values():
        if owner_of[positions[0]] != shares.process:
            continue
        item = next(local[position].item for position in positions if position in local)
        yield [Submission(p, images[p], item, seed_of[p]) for p in positions]
