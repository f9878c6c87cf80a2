"""Evaluation: fixed prompts and noise at test resolution, plain Euler sampling, every image kept with its scores."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from ml_collections import ConfigDict
from PIL import Image

from paco_grpo.policies.base import Policy
from paco_grpo.rewards.registry import Reward
from paco_grpo.sampling.rollout import rollout
from paco_grpo.training.collect import at_size, batches_by_key
from paco_grpo.training.pictures import REFERENCE_SIDE, contact_sheet, reference_file, thumbnail
from paco_grpo.training.processes import any_process
from paco_grpo.training.scoring import ScoringQueue
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_SHEET_IMAGES = 36
_ENCODED_AHEAD = 32  # batches, where text encoders have to be brought to the accelerator first


def evaluation_set(items: Sequence[Item], num_images: int | None, seed: int) -> list[tuple[Item, int]]:
    """The images of an evaluation: items in order, again from the start if more images than items are wanted.

    Returns:
        (item, noise seed) for each image; the seed depends on ``seed``, the item and how often it came before alone.
    """
    count = len(items) if num_images is None else num_images
    chosen = []
    for index in range(count):
        repeat, position = divmod(index, len(items))
        item = items[position]
        word = np.random.SeedSequence([21, seed, item.item_id, repeat]).generate_state(1, np.uint64)[0]
        chosen.append((item, int(word >> np.uint64(1))))
    return chosen


def evaluate(
    policy: Policy,
    items: Sequence[Item],
    rewards: Mapping[str, Reward],
    config: ConfigDict,
    accelerator: Accelerator,
    folder: Path,
    should_stop: Callable[[], bool],
    joint_forwards: bool = False,
) -> dict[str, float] | None:
    """Draw and score the evaluation set with the weights the policy holds now.

    Writes ``folder/00000.png …`` (if ``config.test.save_eval_images``; for an editor also a small copy of each
    reference image, ``references/00000.png …``), ``eval_data.jsonl``, ``sheet.png`` and ``categories.md``.

    Args:
        policy: The caller puts the EMA weights in place.
        items: Test items.
        rewards: Short name → reward of the test.
        config: The run's; ``config.test`` counts.
        accelerator: Process r of P draws images r, r + P, …
        folder: Shared by all processes.
        should_stop: Whether this process was asked to stop; asked before each batch.
        joint_forwards: See ``Engine``.

    Returns:
        ``eval/<name>_mean``, ``_stderr`` (ddof 1, over images that have the score), ``eval/num_images``,
        ``eval/missing_share`` and ``category/<category>/<name>_mean``; None when a process was asked to stop.

    Raises:
        ScoringError: On every process, when a reward raised.
    """
    seed = config.seed if config.test.seed is None else config.test.seed
    chosen = evaluation_set(items, config.test.num_images, seed)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    mine = list(range(accelerator.process_index, len(chosen), accelerator.num_processes))
    queue = ScoringQueue(rewards, config.sample.reward_batch_size)
    try:
        spare = chosen[:1] if joint_forwards else []
        if not _draw(policy, [chosen[i] for i in mine], mine, spare, config, folder, queue, accelerator, should_stop):
            return None
        scores = queue.gathered(accelerator, len(mine), len(chosen), should_stop)
    finally:
        queue.close()
    if scores is None:
        return None
    missing = int(np.isnan(scores).any(axis=1).sum())
    if missing:
        logger.warning("%d of %d evaluation images lack a score and are left out of its mean", missing, len(scores))
    names, metrics = list(rewards), summarise(scores, list(rewards))
    by_category = summarise_categories(scores, [item.metadata.get("category") for item, _ in chosen], names)
    if accelerator.is_main_process:
        _write_rows(folder / "eval_data.jsonl", chosen, scores, names, config.test.save_eval_images)
        table = category_table({**by_category, "all": metrics}, names)
        (folder / "categories.md").write_text(table, encoding="utf-8")
    accelerator.wait_for_everyone()
    for category, values in by_category.items():
        known = [name for name in names if f"eval/{name}_mean" in values]
        metrics |= {f"category/{category}/{name}_mean": values[f"eval/{name}_mean"] for name in known}
    return metrics


def _draw(
    policy: Policy,
    images: Sequence[tuple[Item, int]],
    numbers: Sequence[int],
    spare: Sequence[tuple[Item, int]],
    config: ConfigDict,
    folder: Path,
    queue: ScoringQueue,
    accelerator: Accelerator,
    should_stop: Callable[[], bool],
) -> bool:
    batches = drawing_batches(policy, [item for item, _ in images], config)
    thumbnails: list[tuple[int, Image.Image, Image.Image | None, str]] = []

    def drawn_images(of: Sequence[tuple[Item, int]], batch: Sequence[int], size: tuple[int, int]) -> list[Image.Image]:
        return draw(policy, [of[i][0] for i in batch], [of[i][1] for i in batch], *size, config.test.num_steps,
                    config.sample.merge_lora and config.use_lora)  # fmt: skip

    # Every process asks equally often, so that the answers of all can be joined.
    for turn in range(max(gather_object([len(batches)]))):
        if any_process(accelerator, should_stop()):
            return False
        if turn >= len(batches):
            for batch, size in drawing_batches(policy, [item for item, _ in spare], config):
                drawn_images(spare, batch, size)  # only because the others need this process's part of the weights
            continue
        if policy.offloads_text_encoders and turn % _ENCODED_AHEAD == 0:
            ahead = batches[turn : turn + _ENCODED_AHEAD]
            policy.encode([_sized(images[i][0], size) for batch, size in ahead for i in batch])  # remembered by it
        batch, size = batches[turn]
        drawn = drawn_images(images, batch, size)
        queue.submit(drawn, [images[i][0] for i in batch], batch)
        for i, image in zip(batch, drawn, strict=True):
            number, item = numbers[i], images[i][0]
            in_sheet = number < _SHEET_IMAGES
            reference = item.image if config.test.save_eval_images or in_sheet else None
            if config.test.save_eval_images:
                image.save(folder / f"{number:05d}.png")
                _save_reference(folder / reference_file(number), reference)
            if in_sheet:
                small = None if reference is None else thumbnail(reference)
                thumbnails.append((number, thumbnail(image), small, item.prompt))
    everyone = gather_object(thumbnails)
    if accelerator.is_main_process:
        _sheet(everyone).save(folder / "sheet.png")
    return True


def _save_reference(path: Path, reference: Image.Image | None) -> None:
    if reference is not None:
        path.parent.mkdir(exist_ok=True)
        small = min(1.0, REFERENCE_SIDE / max(reference.size))
        reference.resize([max(1, round(side * small)) for side in reference.size]).save(path)


def _sheet(thumbnails: Sequence[tuple[int, Image.Image, Image.Image | None, str]]) -> Image.Image:
    """The contact sheet of (number, image, reference, prompt); with instructions where images are edited."""
    ordered = sorted(thumbnails, key=lambda entry: entry[0])
    images, references = [entry[1] for entry in ordered], [entry[2] for entry in ordered if entry[2] is not None]
    if len(references) < len(images):
        return contact_sheet(images)
    return contact_sheet(images, [entry[3] for entry in ordered], references)


def drawing_batches(
    policy: Policy, items: Sequence[Item], config: ConfigDict
) -> list[tuple[list[int], tuple[int, int]]]:
    """Indices into ``items`` in batches that share a forward at test resolution, each with its height and width."""
    sizes, keys = [], []
    for item in items:  # one reference image in memory at a time
        sized = at_size(item, config.test.resolution, config.item_size, policy)
        sizes.append((sized.height, sized.width))
        keys.append(policy.batch_key(sized))
    return [(batch, sizes[batch[0]]) for batch in batches_by_key(keys, config.test.batch_size)]


@torch.no_grad()
def draw(
    policy: Policy,
    items: Sequence[Item],
    seeds: Sequence[int],
    height: int,
    width: int,
    num_steps: int,
    merge_lora: bool = False,
) -> list[Image.Image]:
    """Images of ``items`` (of one ``Policy.batch_key``), each from its seed, by deterministic Euler sampling."""
    record = rollout(
        policy,
        policy.encode([_sized(item, (height, width)) for item in items]),
        [item.item_id for item in items],
        seeds,
        height,
        width,
        num_steps=num_steps,
        noise_steps=(),
        noise_level=0.0,
        merge_lora=merge_lora,
    )
    return policy.decode(record.clean_latents, height, width)


def _sized(item: Item, size: tuple[int, int]) -> Item:
    return dataclasses.replace(item, height=size[0], width=size[1])


def summarise(scores: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Means and standard errors over images; ``scores`` (n, len(names)), NaN = missing and left out."""
    metrics: dict[str, float] = {
        "eval/num_images": len(scores),
        "eval/missing_share": float(np.isnan(scores).any(axis=1).mean()),
    }
    for column, name in enumerate(names):
        values = scores[:, column]
        values = values[~np.isnan(values)]
        if len(values):
            metrics[f"eval/{name}_mean"] = float(values.mean())
        if len(values) > 1:
            metrics[f"eval/{name}_stderr"] = float(values.std(ddof=1) / math.sqrt(len(values)))
    return metrics


def summarise_categories(
    scores: np.ndarray, categories: Sequence[str | None], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Category → ``summarise`` of its images, in alphabetical order; items without a category are in none of them."""
    return {
        str(category): summarise(scores[[other == category for other in categories]], names)
        for category in sorted({category for category in categories if category is not None}, key=str)
    }


def category_table(summaries: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """A Markdown table with a row for each category: images, and mean ± standard error of each reward."""
    lines = [f"| category | images | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for category, values in summaries.items():
        cells = []
        for name in names:
            mean, error = values.get(f"eval/{name}_mean"), values.get(f"eval/{name}_stderr")
            cells.append("–" if mean is None else f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}"))
        lines.append(f"| {category} | {values['eval/num_images']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _write_rows(
    path: Path, chosen: Sequence[tuple[Item, int]], scores: np.ndarray, names: Sequence[str], saved: bool
) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, (item, seed) in enumerate(chosen):
            reference = reference_file(number)
            row: dict[str, Any] = {
                "file": f"{number:05d}.png" if saved else None,
                "reference": reference if (path.parent / reference).is_file() else None,
                "prompt": item.prompt,
                "item_id": item.item_id,
                "seed": seed,
                "idx": item.metadata.get("idx"),
                "category": item.metadata.get("category"),
                "rewards": {
                    name: None if math.isnan(score) else float(score)
                    for name, score in zip(names, scores[number], strict=True)
                },
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
