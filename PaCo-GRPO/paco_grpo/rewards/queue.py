"""Rewards in the background: one thread per reward scores a batch while the next one is sampled; and their journal."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from paco_grpo.distributed.processes import Stopped, any_process, gather_rows
from paco_grpo.rewards.registry import Reward, build_rewards
from paco_grpo.types import Item
from paco_judge.json_io import DamagedJson, lines, parse_object

if TYPE_CHECKING:
    import torch
    from PIL import Image

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class ScoringError(RuntimeError):
    """A reward raised an exception; the message names the reward."""


class ScoringQueue:
    """Collects the scores of images that are submitted batch by batch.

    A reward gets its batches one after the other and in order (so it need not be thread-safe); different rewards run
    concurrently with each other and with the sampling.

    A reward with the attribute ``compares_images = True`` is called once, after the sampling and with all images of an
    item in one call; the items are dealt out over the processes. Only ``gathered`` returns its scores.

    Args:
        rewards: Short name → callable(images, items).
        batch_size: Images per call; None = as submitted.
    """

    def __init__(self, rewards: Mapping[str, Reward], batch_size: int | None = None) -> None:
        self.rewards, self.batch_size = dict(rewards), batch_size
        self.wait_seconds = 0.0
        self._busy_seconds = dict.fromkeys(self.rewards, 0.0)
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}") for name in self.rewards}
        self._pending: list[tuple[np.ndarray, dict[str, Future]]] = []
        self._comparing = [name for name in self.rewards if getattr(rewards[name], "compares_images", False)]
        self._held: list[tuple[int, Image.Image, Item]] = []  # (row, …) of the images that these will compare

    def submit(self, images: Sequence[Image.Image | None], items: Sequence[Item], rows: Sequence[int]) -> None:
        """Start scoring ``images``; their scores go to ``rows`` of the result, those of None are missing."""
        present = [i for i, image in enumerate(images) if image is not None]
        images, items, rows = ([values[i] for i in present] for values in (images, items, rows))
        size = self.batch_size or max(1, len(images))
        streaming = [name for name in self.rewards if name not in self._comparing]
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            self._start(streaming, images[part], items[part], rows[part])
        if self._comparing:
            self._held += zip(rows, images, items, strict=True)

    def _start(
        self, names: Sequence[str], images: Sequence[Image.Image], items: Sequence[Item], rows: Sequence[int]
    ) -> None:
        futures = {name: self._threads[name].submit(self._score, name, images, items) for name in names}
        self._pending.append((np.asarray(rows, dtype=np.int64), futures))

    def _score(self, name: str, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        started = time.perf_counter()
        try:
            return self.rewards[name](images, items)
        finally:
            self._busy_seconds[name] += time.perf_counter() - started

    @property
    def hidden_share(self) -> float:
        """Share of the slowest reward's time during which the caller did not wait for it, in [0, 1]; NaN where rewards
        took no time. Call it after ``results``."""
        busy = max(self._busy_seconds.values(), default=0.0)
        return max(0.0, 1.0 - self.wait_seconds / busy) if busy > 0 else math.nan

    def results(self, count: int, should_stop: Callable[[], bool] = lambda: False) -> np.ndarray:
        """Wait for everything submitted.

        Args:
            count: Rows of the result.
            should_stop: Asked twice a second while waiting.

        Returns:
            (count, number of rewards) float64 in the order of ``rewards``, NaN = missing.

        Raises:
            Stopped: ``should_stop`` answered True.
            ScoringError: A reward raised; its exception is the cause.
        """
        started = time.perf_counter()
        scores = np.full((count, len(self.rewards)), math.nan)
        columns = {name: column for column, name in enumerate(self.rewards)}
        for rows, futures in self._pending:
            for name, future in futures.items():
                while not future.done():
                    if should_stop():
                        raise Stopped
                    wait([future], timeout=_POLL_SECONDS)
                problem = future.exception()
                if problem is not None:
                    raise ScoringError(f"{name}: {type(problem).__name__}: {problem}") from problem
                scores[rows, columns[name]] = future.result()
        self._pending.clear()
        self.wait_seconds += time.perf_counter() - started
        return scores

    def gathered(self, accelerator: Accelerator, local: int, total: int, should_stop: Callable[[], bool]) -> np.ndarray:
        """Scores of all processes; a collective operation with the same outcome everywhere.

        Args:
            accelerator: Process r of P submitted the images r, r + P, … of ``total``.
            local: Images of this process.
            total: Images of all.
            should_stop: Whether this process was asked to stop.

        Returns:
            (total, number of rewards) float64, NaN = missing.

        Raises:
            Stopped: A process was asked to stop.
            ScoringError: A reward raised on at least one process.
        """
        scores = gather_rows(accelerator, self._results_everywhere(accelerator, local, should_stop), total)
        if self._comparing:
            self._start_comparing(accelerator)
            for compared in gather_object([self._results_everywhere(accelerator, total, should_stop)]):
                scores = np.where(np.isnan(compared), scores, compared)
        return scores

    def _results_everywhere(
        self, accelerator: Accelerator, count: int, should_stop: Callable[[], bool]
    ) -> np.ndarray:
        """This process's ``results``, or on every process the exception of one; a collective operation."""
        scores, problem, stopped = None, None, False
        try:
            scores = self.results(count, should_stop)
        except ScoringError as error:
            problem = error
        except Stopped:
            stopped = True
        if any_process(accelerator, stopped):
            raise Stopped
        if any_process(accelerator, problem is not None):
            raise problem or ScoringError("a reward failed on another process, see its message")
        return scores

    def _start_comparing(self, accelerator: Accelerator) -> None:
        """Exchange the held images so that each item's are on one process, and start scoring; a collective operation."""
        process, processes = accelerator.process_index, accelerator.num_processes
        held = {row * processes + process: (image, item) for row, image, item in self._held}
        groups: dict[int, list[int]] = {}  # item id → positions of its images
        for position, item_id in sorted(gather_object([(position, item.item_id) for position, (_, item) in held.items()])):
            groups.setdefault(item_id, []).append(position)
        load = [0] * processes
        images, items, rows = [], [], []
        for positions in groups.values():
            # The owner has the item itself, which need not survive pickling, from an image of its own.
            owner = min({position % processes for position in positions}, key=lambda rank: (load[rank], rank))
            load[owner] += len(positions)
            # One group at a time: the images of an epoch need not fit into the memory of one process.
            found = dict(gather_object([(position, held[position][0]) for position in positions if position in held]))
            if owner == process:
                item = next(held[position][1] for position in positions if position in held)
                images += [found[position] for position in positions]
                items += [item] * len(positions)
                rows += positions
        self._held.clear()
        if images:
            self._start(self._comparing, images, items, rows)

    def failed(self) -> bool:
        """Whether a reward has already raised (then waiting for more images is pointless)."""
        return any(f.done() and f.exception() is not None for _, futures in self._pending for f in futures.values())

    def close(self) -> None:
        """End the threads without waiting; batches not yet begun are never scored."""
        self._pending.clear()
        self._held.clear()
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)


class ScoreJournal:
    """Scores received since the last checkpoint, on disk: a run that is killed and resumed does not request them again.

    Keys are the reward and the content of image and prompt. Each process appends to its own file and reads all of them
    when a run resumes, so the number of processes may change. A resumed epoch that samples the same images (bit for bit)
    finds their scores; any other image is scored.

    Args:
        folder: ``scores`` of the run's folder.
        process: Number of this process.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.folder, self.path = folder, folder / f"process_{process}.jsonl"
        self.epoch = 0  # finished epochs; scores that arrive now belong to the next one
        self._known: dict[str, float] = {}
        self._own: list[dict] = []  # {epoch, scores}: the lines of this process's file
        self._lock = threading.Lock()  # each reward has its own thread

    def load(self) -> None:
        """Read what all processes had received. A damaged line is skipped: its images are scored again."""
        for path in sorted(self.folder.glob("process_*.jsonl")):
            for number, line in lines(path):
                try:
                    entry = _entry(parse_object(line))
                except (DamagedJson, KeyError) as error:
                    logger.warning("%s line %d is skipped, its images are scored again: %s", path, number, error)
                    continue
                self._known |= entry["scores"]
                if path == self.path:
                    self._own.append(entry)
        if self._own:
            self._rewrite()  # without the truncated line
        if self._known:
            logger.info("reusing %d scores from %s", len(self._known), self.folder)

    def find(self, key: str) -> float:
        """The score under ``key``; NaN if it has not been received."""
        return self._known.get(key, math.nan)

    def add(self, scores: Mapping[str, float]) -> None:
        """Append scores; one call is one line, so a batch is either recorded or not."""
        entry = {"epoch": self.epoch, "scores": dict(scores)}
        with self._lock:
            self._known |= scores
            self._own.append(entry)
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def forget_before(self, epoch: int) -> None:
        """Drop what a run resumed after ``epoch`` finished epochs does not need (a checkpoint was saved)."""
        with self._lock:
            kept = [entry for entry in self._own if entry["epoch"] >= epoch]
            if len(kept) < len(self._own):
                self._own = kept
                self._known = {key: score for entry in kept for key, score in entry["scores"].items()}
                self._rewrite()

    def _rewrite(self) -> None:
        replacement = self.path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(entry) + "\n" for entry in self._own), encoding="utf-8")
        replacement.replace(self.path)


def _entry(row: dict) -> dict:
    """A line of the journal. Raises DamagedJson or KeyError."""
    if type(row["epoch"]) is not int or not isinstance(row["scores"], dict):
        raise DamagedJson("not a line of scores")
    for key, score in row["scores"].items():
        if type(score) not in (int, float) or not abs(score) < math.inf:
            raise DamagedJson(f"{score!r} is not a score of {key}")
    return row


class JournaledReward:
    """``reward``, called only for images whose score is not in the journal.

    Args:
        reward: callable(images, items) -> scores (n,), NaN = missing (and requested again).
        identity: Name and arguments: scores of one reward are not those of another, nor of another judge.
        journal: Where scores are looked up and recorded.
    """

    def __init__(self, reward: Reward, identity: str, journal: ScoreJournal) -> None:
        self.reward, self.journal, self.record = reward, journal, reward.record
        self.check, self.check_items = reward.check, reward.check_items
        self.compares_images = reward.compares_images
        self._identity = hashlib.sha256(identity.encode()).hexdigest()[:8]

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing."""
        keys = []
        for image, item in zip(images, items, strict=True):
            content = hashlib.sha256(f"{item.item_id} {item.prompt} {image.mode} {image.size}".encode())
            content.update(image.tobytes())
            keys.append(f"{self._identity}-{content.hexdigest()[:32]}")
        ids = np.array([item.item_id for item in items])
        if self.compares_images:  # a score holds among the same images, and is asked for again with all of them
            group = {i: hashlib.sha256("".join(k for k, j in zip(keys, ids) if j == i).encode()).hexdigest() for i in set(ids)}
            keys = [f"{key}-{group[i][:16]}" for key, i in zip(keys, ids)]
        scores = np.array([self.journal.find(key) for key in keys], dtype=np.float64)
        asked = np.isnan(scores)
        asked = np.flatnonzero(np.isin(ids, ids[asked]) if self.compares_images else asked)
        if len(asked):
            scores[asked] = self.reward([images[i] for i in asked], [items[i] for i in asked])
            received = {keys[i]: float(scores[i]) for i in asked if not math.isnan(scores[i])}
            if received:
                self.journal.add(received)
        return scores


def journaled(
    name: str, kwargs: Mapping[str, Any], device: torch.device | str, journal: ScoreJournal
) -> JournaledReward:
    """The reward ``name`` with its arguments, built, whose scores are kept in ``journal``. Raises RewardError."""
    (reward,) = build_rewards({name: 1.0}, {name: kwargs}, device).values()
    identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
    # A question file's text may change under its name.
    return JournaledReward(reward, identity + (json.dumps(reward.record) if kwargs.get("question") else ""), journal)
