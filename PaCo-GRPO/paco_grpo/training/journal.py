"""Scores already received, on disk as they come in: a run that is killed and resumed does not ask for them again."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paco_grpo.rewards.registry import Reward
from paco_grpo.types import Item

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


class ScoreJournal:
    """The scores received since the last checkpoint, by reward and content of image and prompt.

    Each process appends to a file of its own and reads all of them when a run resumes, so the number of processes may
    change. A resumed epoch that draws the same images (bit for bit) finds their scores; another image is asked for.

    Args:
        folder: ``scores`` of the run's folder.
        process: Number of this process.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.folder, self.path = folder, folder / f"process_{process}.jsonl"
        self.epoch = 0  # finished epochs: what a score that comes in now will be needed for
        self._known: dict[str, float] = {}
        self._own: list[tuple[int, str]] = []  # (epoch, line) of this process's file
        self._lock = threading.Lock()  # rewards come in from threads of their own

    def load(self) -> None:
        """Read what all processes had received; a line cut short by a kill is left out."""
        for path in sorted(self.folder.glob("process_*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self._known |= entry["scores"]
                if path == self.path:
                    self._own.append((entry["epoch"], line))
        if self._own:
            self._rewrite()  # without the line that was cut short
        if self._known:
            logger.info("%d scores received before are taken from %s", len(self._known), self.folder)

    def find(self, key: str) -> float:
        """The score under ``key``; NaN if it has not been received."""
        return self._known.get(key, math.nan)

    def add(self, scores: Mapping[str, float]) -> None:
        """Write down scores; one call is one line, so a batch is either there or not."""
        line = json.dumps({"epoch": self.epoch, "scores": dict(scores)})
        with self._lock:
            self._known |= scores
            self._own.append((self.epoch, line))
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def forget_before(self, epoch: int) -> None:
        """Drop what a run that resumes after ``epoch`` finished epochs does not need (a checkpoint was saved)."""
        with self._lock:
            kept = [(number, line) for number, line in self._own if number >= epoch]
            if len(kept) == len(self._own):
                return
            self._own = kept
            self._known = {}
            for _, line in kept:
                self._known |= json.loads(line)["scores"]
            self._rewrite()

    def _rewrite(self) -> None:
        replacement = self.path.with_suffix(".tmp")
        replacement.write_text("".join(line + "\n" for _, line in self._own), encoding="utf-8")
        replacement.replace(self.path)


class JournaledReward:
    """``reward``, asked only for images whose score is not in the journal.

    Args:
        reward: callable(images, items) -> scores (n,), NaN = missing (and asked for again).
        identity: Name and arguments in words: scores of one reward are not those of another, nor of another judge.
        journal: Where scores are looked up and written down.
    """

    def __init__(self, reward: Reward, identity: str, journal: ScoreJournal) -> None:
        self.reward, self.journal = reward, journal
        self._identity = hashlib.sha256(identity.encode()).hexdigest()[:8]

    def check(self) -> None:
        """Ask the reward whether it can work."""
        self.reward.check()

    def check_items(self, items: Sequence[Item]) -> None:
        """Look for an item that the reward can give no score."""
        self.reward.check_items(items)

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing."""
        keys = [self._key(image, item) for image, item in zip(images, items, strict=True)]
        scores = np.array([self.journal.find(key) for key in keys], dtype=np.float64)
        asked = np.flatnonzero(np.isnan(scores))
        if len(asked):
            scores[asked] = self.reward([images[i] for i in asked], [items[i] for i in asked])
            received = {keys[i]: float(scores[i]) for i in asked if not math.isnan(scores[i])}
            if received:
                self.journal.add(received)
        return scores

    def _key(self, image: Image.Image, item: Item) -> str:
        content = hashlib.sha256(f"{item.item_id} {item.prompt} {image.mode} {image.size}".encode())
        content.update(image.tobytes())
        return f"{self._identity}-{content.hexdigest()[:32]}"
