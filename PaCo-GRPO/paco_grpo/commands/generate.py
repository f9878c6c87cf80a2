"""The work of ``generate``: images of prompts, with scores of a judge."""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.data.prompts import make_item, read_items, read_reference
from paco_grpo.data.sets import has_references, reward_arguments
from paco_grpo.evaluation.evaluate import (
    EvaluationImage,
    evaluation_batches,
    evaluation_latents,
)
from paco_grpo.evaluation.folder import contact_sheet, thumbnail
from paco_grpo.monitoring.progress import progress
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.adapters import add_lora, find_lora
from paco_grpo.policies.loading import apply_speed, load_generator, text_length
from paco_grpo.rewards.contract import Reward
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.rewards.sets import begun
from paco_grpo.sampling.denoise import Sampling
from paco_grpo.sampling.images import decode
from paco_grpo.training.checks import check_items
from paco_grpo.training.references import check_headers, stored_images
from paco_grpo.training.resolve import resolve_for_images
from paco_grpo.types import Item
from paco_judge.files import write_json_lines

logger = logging.getLogger(__name__)


def generate(options: RunOptions, command: argparse.Namespace) -> int:
    """Write images, a sheet and, with a judge, scores.jsonl; returns the number of images kept."""
    items = items_to_draw(options, command)
    options = resolve_for_images(options)
    check_items(options, {"given": items})
    check_headers(stored_images(items))
    adapter = find_lora(command.adapter, "--adapter") if command.adapter else None
    if command.best is not None and (command.best < 1 or not command.judge):
        raise ConfigError(f"--best {command.best} must be at least 1 and needs --judge URL")
    judge = _judge(options, command.judge, items) if command.judge else None
    text_length(options, items)  # warns of prompts that will be truncated
    in_training = options.train.max_sequence_length
    logger.info(
        "texts: %d tokens; in training: %s (config.train.max_sequence_length)",
        options.max_sequence_length,
        "the same" if in_training is None else in_training or "what its prompts need",
    )
    folder = command.output
    folder.mkdir(parents=True, exist_ok=True)
    policy = load_generator(options, "cuda" if torch.cuda.is_available() else "cpu")
    if adapter:
        add_lora(policy, lora_path=adapter, option="--adapter")
    apply_speed(options, policy)

    images = list(itertools.starmap(EvaluationImage, itertools.product(items, command.seeds)))
    (folder / "scores.jsonl").unlink(missing_ok=True)  # of other images
    names = {_file_name(*image) for image in images}
    earlier = [path.name for path in sorted(folder.glob("*_seed*.png")) if path.name not in names]
    if earlier:
        logger.warning(
            "%s keeps %d images of earlier calls, such as %s", folder, len(earlier), earlier[0]
        )
    rewards = {} if judge is None else {"judge": judge}
    queue = ScoreQueue(rewards, options.sample.reward_batch_size)
    with begun(rewards.values(), folder), contextlib.closing(queue):
        with progress("generate", len(images)) as finish:
            pictures = _sample(options, policy, images, folder, queue, finish)
        scores = queue.results(len(images))
    captions = [_caption(item, seed) for item, seed in images]
    num_kept = len(images)
    if judge is not None:
        write_records({"judge": judge}, folder)
        rows = _rows(images, scores[:, 0])
        if command.best is not None:
            num_kept = _keep_best(rows, command.best, folder)
        write_json_lines(folder / "scores.jsonl", rows)
        for number, row in enumerate(rows):
            score = "–" if row["judge"] is None else f"{row['judge']:.3f}"
            captions[number] += f"\njudge {score}{'' if row['kept'] else ', removed'}"
    references = []
    for item, _ in images:
        image = item.image
        if image is not None:
            references.append(thumbnail(image))
    contact_sheet(pictures, captions, references).save(folder / "sheet.png")
    return num_kept


def items_to_draw(options: RunOptions, command: argparse.Namespace) -> list[Item]:
    """The items of ``--prompt``, and those of ``--prompts_file`` with their sizes and images.

    ``--image`` replaces the images of the file.
    """
    images = command.image
    items = [make_item(0, {"prompt": prompt}, "--prompt") for prompt in command.prompt]
    if command.prompts_file is not None:
        items += read_items(command.prompts_file, has_references(options) and not images)
    if not items:
        raise ConfigError("nothing to generate: give --prompt TEXT or --prompts_file FILE")
    if len(images) not in (0, 1, len(items)):
        raise ConfigError(
            f"--image is given {len(images)} times for {len(items)} prompts; give it once, or "
            "for each"
        )
    numbered = []
    for number, item in enumerate(items):
        paths = images[number : number + 1] if len(images) > 1 else images
        replacements = tuple(read_reference(path, f"--image {path}") for path in paths)
        references = replacements or item.references
        metadata = dict(item.metadata)
        if replacements:
            metadata.pop("reference_boxes", None)  # of the images that are replaced
        numbered.append(
            dataclasses.replace(item, item_id=number, metadata=metadata, references=references)
        )
    if len({item.num_references > 0 for item in numbered}) > 1:
        raise ConfigError(
            "some prompts edit an image and some do not: draw them with separate commands"
        )
    return numbered


def _judge(options: RunOptions, url: str, items: Sequence[Item]) -> Reward:
    """The configuration's judge for these items, but at ``url``; it has answered."""
    name = "consistency_for_editing" if items[0].num_references else "consistency_score"
    kwargs = reward_arguments(options, name)
    kwargs |= {"base_url": url, "host": None, "port": None}
    judge = build_rewards({name: 1.0}, {name: kwargs})[name]
    judge.check_items(items)
    judge.check()
    judge.prove(items)
    return judge


def _sample(
    options: RunOptions,
    policy: Policy,
    images: Sequence[EvaluationImage],
    folder: Path,
    queue: ScoreQueue,
    finish: Callable[[int], object],
) -> list[Image.Image]:
    """Sample the images, write them to ``folder`` and submit them, until a score fails.

    ``finish`` is called with the number of images of each finished batch.
    """
    pictures: dict[int, Image.Image] = {}
    sampling = Sampling(options.test.num_steps)
    for batch in evaluation_batches(policy, [item for item, _ in images], options):
        if queue.failed():
            break
        in_batch = [images[number] for number in batch.numbers]
        latents = evaluation_latents(policy, in_batch, batch, sampling)
        for number, picture in zip(batch.numbers, decode(policy, latents, batch), strict=True):
            name = _file_name(*images[number])
            if picture is None:
                raise ConfigError(
                    f"{name} is not finite: look at the weights and config.mixed_precision"
                )
            picture.save(folder / name, compress_level=1)
            pictures[number] = picture
        new = [pictures[number] for number in batch.numbers]
        items = [item for item, _ in in_batch]
        queue.submit(new, items, batch.numbers, [seed for _, seed in in_batch])
        finish(len(batch.numbers))
    return [pictures[number] for number in sorted(pictures)]


def _rows(images: Sequence[EvaluationImage], scores: np.ndarray) -> list[dict[str, Any]]:
    """Rows of scores.jsonl; a missing score is None."""
    rows = []
    for (item, seed), score in zip(images, scores.tolist(), strict=True):
        row = {"file": _file_name(item, seed), "prompt": item.prompt, "seed": seed, "kept": True}
        rows.append(row | {"judge": None if math.isnan(score) else score})
    return rows


def _keep_best(rows: Sequence[dict[str, Any]], best: int, folder: Path) -> int:
    """Remove all but the ``best`` images of each prompt; returns how many are kept."""
    ranks: Counter[str] = Counter()
    # Missing scores come last.
    for row in sorted(rows, key=lambda row: math.inf if row["judge"] is None else -row["judge"]):
        prompt = row["file"].partition("_")[0]  # its number
        ranks[prompt] += 1
        row["kept"] = ranks[prompt] <= best
        if not row["kept"]:
            (folder / row["file"]).unlink()
    return sum(row["kept"] for row in rows)


def _caption(item: Item, seed: int) -> str:
    return f"{item.item_id}, seed {seed}: {' '.join(item.prompt.split())}"


def _file_name(item: Item, seed: int) -> str:
    return f"{item.item_id:05d}_seed{seed}.png"
