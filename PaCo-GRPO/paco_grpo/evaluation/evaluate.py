"""Evaluation: fixed prompts and noise at test resolution, plain Euler sampling."""

import contextlib
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.data.sets import PromptSet, items_in_turn
from paco_grpo.distributed import Shares, Stopped, Strategy, any_process, same_outcome
from paco_grpo.evaluation.folder import EvaluationFolder
from paco_grpo.monitoring.metrics import evaluation_metrics, set_metrics
from paco_grpo.monitoring.progress import progress
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.rewards.contract import Reward
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.rewards.registry import watched_rewards
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import Batch, decode, plan_batches
from paco_grpo.types import Item, Stream
from paco_judge.errors import UserError
from paco_judge.files import write_json_lines

logger = logging.getLogger(__name__)

_ENCODED_AHEAD = 32  # batches, where text encoders must be moved to the accelerator first


class EvaluationError(UserError):
    """No image of an evaluation is finite, so there is nothing to score."""


class EvaluationImage(NamedTuple):
    """An image to draw: its prompt, and the seed of its noise."""

    item: Item
    seed: int


def evaluation_set(
    items: Sequence[Item], num_images: int | None, seed: int
) -> list[EvaluationImage]:
    """``num_images`` images of ``items_in_turn``; None: one of every item.

    An image's seed depends only on ``seed``, its item and how often that came before.
    """
    images = []
    repeats: Counter[int] = Counter()  # by item id
    for item in items_in_turn(items, num_images) if num_images else items:
        repeat = repeats[item.item_id]
        repeats[item.item_id] += 1
        words = np.random.SeedSequence([Stream.EVALUATION, seed, item.item_id, repeat])
        word = words.generate_state(1, np.uint64)[0]
        images.append(EvaluationImage(item, int(word >> np.uint64(1))))
    return images


def log_repeats(
    items: Sequence[Item],
    sets: Sequence[PromptSet],
    options: RunOptions,
    rewards: Mapping[str, Reward],
) -> None:
    """Say which prompts an evaluation draws more than once.

    It is meant where a reward compares the images of a prompt.
    """
    count = options.test.num_images or len(items)
    drawn = Counter(item.item_id for item in items_in_turn(items, count))
    repeats = []
    for number, prompt_set in enumerate(sets):
        times = [drawn[item.item_id] for item in items if item.dataset == number]
        if max(times, default=0) > 1:
            of_name = f"{prompt_set.name}: " if prompt_set.name else ""
            at_most = "" if len(set(times)) == 1 else "up to "
            repeats.append(
                f"{of_name}{len(times)} prompts, {sum(times)} images: each is drawn "
                f"{at_most}{max(times)} times"
            )
    if repeats:
        shared = f", shared by {len(sets)} prompt sets" if len(sets) > 1 else ""
        is_meant = any(reward.compares_images for reward in rewards.values())
        logger.log(
            logging.INFO if is_meant else logging.WARNING,
            "config.test.num_images=%s%s: %s",
            options.test.num_images,
            shared,
            "; ".join(repeats),
        )


@dataclass(frozen=True)
class Evaluation:
    """Samples and scores the evaluation set with a policy's current weights.

    Each process samples its share (``Shares``).
    """

    policy: Policy
    items: Sequence[Item]
    rewards: Mapping[str, Reward]
    options: RunOptions
    strategy: Strategy
    prompt_sets: Sequence[PromptSet]  # that ``items`` are of
    merge_lora: bool = False

    def run(
        self,
        folder: Path,
        should_stop: Callable[[], bool] = lambda: False,
        keep_images: bool = False,
        epoch: int | None = None,
    ) -> dict[str, float] | None:
        """Write images, ``eval_data.jsonl`` and ``sheet.png`` to ``folder``, and return metrics.

        Args:
            folder: Shared by all processes; see ``EvaluationFolder``.
            should_stop: Whether this process was asked to stop; asked before each batch.
            keep_images: A batch whose images are all in ``folder`` is not sampled again; else they
                are removed first.
            epoch: The last one that has trained the weights, for rewards that ask for it.

        Returns:
            As ``evaluation_metrics``; None when a process was asked to stop.

        Raises:
            ScoringError: On every process, when a reward raised.
            EvaluationError: On every process, when no image is finite.
        """
        accelerator = self.strategy.accelerator
        test = self.options.test
        seed = self.options.seed if test.seed is None else test.seed
        images = evaluation_set(self.items, test.num_images, seed)
        pictures = EvaluationFolder(folder, test.save_eval_images)
        with same_outcome(accelerator):
            if accelerator.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
                if not keep_images:
                    pictures.clear()
        sets = self.prompt_sets
        watched = watched_rewards([prompt_set.test.weights for prompt_set in sets])
        queue = ScoreQueue(self.rewards, self.options.sample.reward_batch_size, watched, epoch)
        with contextlib.closing(queue):
            try:
                num_finite = self._sample(
                    images, pictures, queue, lambda: should_stop() or queue.failed()
                )
                scores = queue.gathered(accelerator, len(images), should_stop)
            except Stopped:
                if not any_process(accelerator, should_stop()):
                    # A reward has failed, and this raises its error.
                    queue.gathered(accelerator, len(images), should_stop)
                return None
        if num_finite == 0:
            raise EvaluationError(
                f"none of the {len(images)} evaluation images is finite: the generator is damaged"
            )
        scores, missing = measured(scores, self.rewards, images)
        with same_outcome(accelerator):
            if accelerator.is_main_process:
                _write_rows(pictures, images, scores, self.rewards, [s.name for s in sets])
        if missing.any():
            logger.warning(
                "%d of %d evaluation images lack a score and are left out of its mean",
                missing.any(axis=1).sum(),
                len(scores),
            )
        names = list(self.rewards)
        pictures.write_sheet(accelerator.is_main_process, dict(zip(names, scores.T, strict=True)))
        categories = [image.item.metadata.get("category") for image in images]
        metrics = evaluation_metrics(scores, missing, names, categories)
        if self.options.datasets:
            datasets = np.array([image.item.dataset for image in images])
            groups = [prompt_set.metrics for prompt_set in sets]
            metrics |= set_metrics(scores, names, datasets, groups, missing)
        return metrics

    def _sample(
        self,
        images: Sequence[EvaluationImage],
        pictures: EvaluationFolder,
        queue: ScoreQueue,
        should_stop: Callable[[], bool],
    ) -> int:
        """Sample, save and submit the images; returns how many are finite, over all processes."""
        policy = self.policy
        accelerator = self.strategy.accelerator
        shares = Shares.of(accelerator, len(images))

        def deliver(decoded: list[Image.Image | None], batch: Batch) -> None:
            """Submit images to the rewards, and write them to the folder."""
            rows = [shares.number_of(position) for position in batch.numbers]
            # Rewards keep parts of a loaded item; those of the data set would fill the memory.
            items = [images[number].item.load() for number in batch.numbers]
            seeds = [images[number].seed for number in batch.numbers]
            queue.submit(decoded, items, rows, seeds)
            for number, image in zip(batch.numbers, decoded, strict=True):
                if image is not None:
                    pictures.add(number, image, images[number].item)

        # This process's images in batches of one size. What is saved already is only scored.
        positions = shares.positions
        items = [images[position].item for position in positions]
        batches = []
        with same_outcome(accelerator):  # reference images are read before the first forward
            for batch in evaluation_batches(policy, items, self.options):
                batch = dataclasses.replace(batch, numbers=[positions[i] for i in batch.numbers])
                saved = [pictures.read(number) for number in batch.numbers]
                if None in saved:
                    batches.append(batch)
                else:
                    deliver(saved, batch)
            (dummy,) = evaluation_batches(policy, [images[0].item], self.options)

        # Sample the others. In lockstep with other processes, some batches are dummies.
        sampling = Sampling(self.options.test.num_steps, merge_lora=self.merge_lora)
        synced = self.strategy.synced_batches(batches, dummy, should_stop)
        total = sum(len(batch.numbers) for batch in batches)
        shown = progress(
            "evaluation", total, accelerator.is_main_process, accelerator.num_processes
        )
        with self.strategy.same_outcome(), shown as finish:
            for position, (batch, is_dummy) in enumerate(synced):
                if policy.offloads_text_encoders and position % _ENCODED_AHEAD == 0:
                    ahead = batches[position : position + _ENCODED_AHEAD]
                    self._encode_ahead(images, ahead)
                in_batch = [images[number] for number in batch.numbers]
                latents = evaluation_latents(policy, in_batch, batch, sampling)
                if not is_dummy:
                    deliver(decode(policy, latents, batch), batch)
                    finish(len(batch.numbers))
        return sum(gather_object([pictures.count]))

    def _encode_ahead(self, images: Sequence[EvaluationImage], batches: Sequence[Batch]) -> None:
        """Encode the prompts of several batches in one call; the policy caches the features."""
        items = []
        for batch in batches:
            items += [_sized(images[number].item, batch) for number in batch.numbers]
        if items:
            self.policy.encode(items)


def evaluation_batches(policy: Policy, items: Sequence[Item], options: RunOptions) -> list[Batch]:
    """``items`` in batches of one size, at test resolution."""
    test = options.test
    return plan_batches(policy, items, test.resolution, options.item_size, test.batch_size)


def evaluation_latents(
    policy: Policy, images: Sequence[EvaluationImage], batch: Batch, sampling: Sampling
) -> torch.Tensor:
    """Sample the images of a batch; returns their latents (B, L, C)."""
    items = [_sized(image.item, batch) for image in images]
    item_ids = [item.item_id for item in items]
    seeds = [image.seed for image in images]
    draws = Draws(item_ids, seeds, batch.height, batch.width)
    return rollout(policy, policy.encode(items), draws, sampling).clean_latents


def _sized(item: Item, batch: Batch) -> Item:
    return dataclasses.replace(item, height=batch.height, width=batch.width)


def measured(
    scores: np.ndarray, rewards: Mapping[str, Reward], images: Sequence[EvaluationImage]
) -> tuple[np.ndarray, np.ndarray]:
    """``scores`` (images, rewards) without those that mean nothing, and which are missing.

    A reward that compares the images of a prompt has no score for a prompt's only image, and one
    that is not of the image's prompt set has none. Neither is missing.
    """
    expected = np.empty(scores.shape, bool)
    counts = Counter(image.item.item_id for image in images)
    for column, reward in enumerate(rewards.values()):
        for row, image in enumerate(images):
            is_alone = reward.compares_images and counts[image.item.item_id] == 1
            expected[row, column] = reward.applies_to(image.item) and not is_alone
    return np.where(expected, scores, np.nan), expected & np.isnan(scores)


def _write_rows(
    pictures: EvaluationFolder,
    images: Sequence[EvaluationImage],
    scores: np.ndarray,
    rewards: Mapping[str, Reward],
    sets: Sequence[str],
) -> None:
    """Write ``eval_data.jsonl``, a line for each image; ``sets`` are names of prompt sets."""
    rows = []
    for number, (image, values) in enumerate(zip(images, scores.tolist(), strict=True)):
        item = image.item
        category = item.metadata.get("category")
        row: dict[str, Any] = {
            "file": None,  # not saved, or not finite
            "reference": None,
            "prompt": item.prompt,
            "item_id": item.item_id,
            "seed": image.seed,
            "idx": item.metadata.get("idx"),
            "category": None if category is None else str(category),
            "open": bool(item.metadata.get("open", False)),
            "rewards": {},
        }
        if sets != [""]:
            row["dataset"] = sets[item.dataset]
        files = {"file": pictures.image_file(number), "reference": pictures.reference_file(number)}
        for key, file in files.items():
            if file.is_file():
                row[key] = file.relative_to(pictures.path).as_posix()
        for (name, reward), score in zip(rewards.items(), values, strict=True):
            if reward.applies_to(item):
                row["rewards"][name] = None if math.isnan(score) else score
        rows.append(row)
    write_json_lines(pictures.path / "eval_data.jsonl", rows)
