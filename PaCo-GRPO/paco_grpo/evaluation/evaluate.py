"""Evaluation: fixed prompts and noise at test resolution, plain Euler sampling."""

import contextlib
import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.atomic import write_atomically
from paco_grpo.distributed.processes import Replicated, Stopped
from paco_grpo.evaluation.pictures import contact_sheet, thumbnail
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.rewards.registry import Reward
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import Batch, Decoder, plan_batches
from paco_grpo.types import Item
from paco_judge.images import UnreadableImage, read_image

logger = logging.getLogger(__name__)

_STREAM = 21  # first word of the noise seeds
_SHEET_IMAGES = 36
_REFERENCE_SIDE = 256  # pixels at most of the copies of reference images
_ENCODED_AHEAD = 32  # batches, where text encoders must be moved to the accelerator first


class EvaluationError(RuntimeError):
    """An evaluation without one image that is finite: there is nothing to score."""


def evaluation_set(
    items: Sequence[Item], num_images: int | None, seed: int
) -> list[tuple[Item, int]]:
    """(item, noise seed) of each image: items in order, again from the start if there are more images than items.

    A seed depends only on ``seed``, the item and how often it came before.
    """
    chosen = []
    for index in range(num_images or len(items)):
        repeat, position = divmod(index, len(items))
        item = items[position]
        word = np.random.SeedSequence([_STREAM, seed, item.item_id, repeat]).generate_state(
            1, np.uint64
        )[0]
        chosen.append((item, int(word >> np.uint64(1))))
    return chosen


def evaluate(
    policy: Policy,
    items: Sequence[Item],
    rewards: Mapping[str, Reward],
    options: RunOptions,
    strategy: Replicated,
    folder: Path,
    should_stop: Callable[[], bool] = lambda: False,
    merge_lora: bool = False,
    keep_images: bool = False,
) -> dict[str, float] | None:
    """Sample and score the evaluation set with the policy's current weights; process r of P samples images r, r + P, …

    Writes ``folder/00000.png …`` (if ``config.test.save_eval_images``; for an editor also a small copy of each
    reference image, ``references/00000.png …``), ``eval_data.jsonl`` and ``sheet.png``.

    Args:
        folder: Shared by all processes.
        should_stop: Whether this process was asked to stop; asked before each batch.
        keep_images: A batch whose images are all in ``folder`` is not sampled again.

    Returns:
        ``eval/<name>_mean``, ``_stderr`` (ddof 1, over images that have the score), ``_missing`` (share of the images,
        if any lack it), ``eval/num_images``, ``eval/missing_share`` and ``category/<category>/<name>_mean``; None when a process was asked to stop.

    Raises:
        ScoringError: On every process, when a reward raised.
        EvaluationError: On every process, when no image is finite.
    """
    accelerator, test = strategy.accelerator, options.test
    chosen = evaluation_set(
        items, test.num_images, options.seed if test.seed is None else test.seed
    )
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    with contextlib.closing(ScoreQueue(rewards, options.sample.reward_batch_size)) as queue:
        try:
            num_finite = _sample(
                policy,
                chosen,
                options,
                strategy,
                folder,
                queue,
                should_stop,
                merge_lora,
                keep_images,
            )
            scores = queue.gathered(accelerator, len(chosen), should_stop)
        except Stopped:
            return None
    if num_finite == 0:
        raise EvaluationError(
            f"none of the {len(chosen)} evaluation images is finite: the generator is damaged"
        )
    missing = missing_scores(scores, rewards, chosen)
    if missing.any():
        logger.warning(
            "%d of %d evaluation images lack a score and are left out of its mean",
            missing.any(axis=1).sum(),
            len(scores),
        )
    names, categories = list(rewards), [item.metadata.get("category") for item, _ in chosen]
    if accelerator.is_main_process:
        lines = []
        for number, ((item, seed), values) in enumerate(zip(chosen, scores.tolist(), strict=True)):
            image, reference = _files(folder, number)
            category = categories[number]
            row = {
                "file": image.name if image.is_file() else None,  # not saved, or not finite
                "reference": f"references/{reference.name}" if reference.is_file() else None,
                "prompt": item.prompt,
                "item_id": item.item_id,
                "seed": seed,
                "idx": item.metadata.get("idx"),
                "category": None if category is None else str(category),
                "open": bool(item.metadata.get("open", False)),
                "rewards": {},
            }
            for name, score in zip(names, values, strict=True):
                row["rewards"][name] = None if math.isnan(score) else score
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        write_atomically(folder / "eval_data.jsonl", "".join(lines))
    accelerator.wait_for_everyone()
    metrics = {f"eval/{key}": value for key, value in summarize(scores, names).items()}
    metrics["eval/missing_share"] = float(missing.any(axis=1).mean())
    for name, share in zip(names, missing.mean(axis=0).tolist(), strict=True):
        if share:
            metrics[f"eval/{name}_missing"] = share
    for category in sorted({*categories} - {None}, key=str):
        found = summarize(scores[[other == category for other in categories]], names)
        metrics |= {
            f"category/{category}/{key}": value
            for key, value in found.items()
            if key.endswith("_mean")
        }
    return metrics


def missing_scores(
    scores: np.ndarray, rewards: Mapping[str, Reward], chosen: Sequence[tuple[Item, int]]
) -> np.ndarray:
    """Which of ``scores`` (images, rewards) are missing; a reward that compares images owes a single one nothing."""
    missing = np.isnan(scores)
    item_ids = [item.item_id for item, _ in chosen]
    counts = Counter(item_ids)
    is_alone = np.array([counts[item_id] == 1 for item_id in item_ids])
    for column, reward in enumerate(rewards.values()):
        if getattr(reward, "compares_images", False):
            missing[is_alone, column] = False
    return missing


def _sample(
    policy, chosen, options, strategy, folder, queue, should_stop, merge_lora, keep_images
) -> int:
    """Sample, save and submit the images; returns how many are finite, over all processes."""
    accelerator, test = strategy.accelerator, options.test
    mine = list(range(accelerator.process_index, len(chosen), accelerator.num_processes))
    batches = test_batches(policy, [chosen[i][0] for i in mine], options)
    batches = [
        dataclasses.replace(batch, numbers=[mine[i] for i in batch.numbers]) for batch in batches
    ]
    made = [b for b in batches if keep_images and all(saved_image(folder, i) for i in b.numbers)]
    batches = [batch for batch in batches if batch not in made]
    position = {batch.numbers[0]: place for place, batch in enumerate(batches)}
    thumbnails: list[tuple[int, Image.Image, Image.Image | None, str]] = []
    finite: list[int] = []  # numbers of the images that are

    def inputs(batch: Batch) -> dict[str, Any]:
        place = position.get(batch.numbers[0])  # None for a dummy
        if policy.offloads_text_encoders and place is not None and place % _ENCODED_AHEAD == 0:
            ahead = batches[place : place + _ENCODED_AHEAD]
            policy.encode(
                [_sized(chosen[i][0], each) for each in ahead for i in each.numbers]
            )  # the policy caches it
        return test_inputs(policy, [chosen[i] for i in batch.numbers], batch)

    def deliver(images: list[Image.Image | None], batch: Batch) -> None:
        rows = [i // accelerator.num_processes for i in batch.numbers]
        queue.submit(images, [chosen[i][0] for i in batch.numbers], rows)
        for number, image in zip(batch.numbers, images, strict=True):
            if image is None:
                continue
            finite.append(number)
            item, in_sheet = chosen[number][0], number < _SHEET_IMAGES
            reference = item.image if test.save_eval_images or in_sheet else None
            image_file, reference_file = _files(folder, number)
            if test.save_eval_images and batch not in made:
                partial = image_file.with_suffix(".tmp")
                # Level 1: a smaller file would cost more time than writing a larger one.
                image.save(partial, format="PNG", compress_level=1)
                partial.replace(image_file)  # whole, or not there
            if test.save_eval_images and reference is not None:
                reference_file.parent.mkdir(exist_ok=True)
                small = reference.copy()
                small.thumbnail((_REFERENCE_SIDE, _REFERENCE_SIDE))
                small.save(reference_file)
            if in_sheet:
                thumbnails.append(
                    (number, thumbnail(image), reference and thumbnail(reference), item.prompt)
                )

    for batch in made:
        deliver([saved_image(folder, i) for i in batch.numbers], batch)
    (dummy,) = test_batches(policy, [chosen[0][0]], options)
    synced = strategy.synced_batches(batches, dummy, should_stop)
    sampling = Sampling(test.num_steps, merge_lora=merge_lora)
    with Decoder(policy, deliver) as decoder:
        for batch, is_dummy in synced:
            record = rollout(policy, sampling=sampling, **inputs(batch))
            if not is_dummy:
                decoder.submit(record.clean_latents, batch)
    everyone = sorted(gather_object(thumbnails), key=itemgetter(0))
    if accelerator.is_main_process and everyone:
        _, images, references, prompts = zip(*everyone, strict=True)
        edited = (prompts, references) if None not in references else ()
        contact_sheet(images, *edited).save(folder / "sheet.png")
    return len(gather_object(finite))


def saved_image(folder: Path, number: int) -> Image.Image | None:
    """Image ``number`` of an earlier evaluation in ``folder``; None if it is not there or damaged."""
    path, _ = _files(folder, number)
    try:
        return read_image(path) if path.is_file() else None
    except UnreadableImage:
        return None


def _files(folder: Path, number: int) -> tuple[Path, Path]:
    """Where image ``number`` is kept, and the copy of its reference image."""
    return folder / f"{number:05d}.png", folder / "references" / f"{number:05d}.png"


def test_batches(policy: Policy, items: Sequence[Item], options: RunOptions) -> list[Batch]:
    """``items`` in batches of one size, at test resolution."""
    return plan_batches(
        policy, items, options.test.resolution, options.item_size, options.test.batch_size
    )


def test_inputs(policy: Policy, images: Sequence[tuple[Item, int]], batch: Batch) -> dict[str, Any]:
    """What ``rollout`` needs of the (item, seed) pairs of a batch."""
    item_ids = [item.item_id for item, _ in images]
    seeds = [seed for _, seed in images]
    return {
        "conditioning": policy.encode([_sized(item, batch) for item, _ in images]),
        "draws": Draws(item_ids, seeds, batch.height, batch.width),
    }


def _sized(item: Item, batch: Batch) -> Item:
    return dataclasses.replace(item, height=batch.height, width=batch.width)


def summarize(scores: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """``NAME_mean``, ``NAME_stderr``, ``num_images``, ``missing_share``; ``scores`` (images, names), NaN = missing."""
    metrics = {
        "num_images": len(scores),
        "missing_share": float(np.isnan(scores).any(axis=1).mean()),
    }
    for name, values in zip(names, scores.T, strict=True):
        values = values[~np.isnan(values)]
        if len(values):
            metrics[f"{name}_mean"] = float(values.mean())
        if len(values) > 1:
            metrics[f"{name}_stderr"] = float(values.std(ddof=1) / math.sqrt(len(values)))
    return metrics
