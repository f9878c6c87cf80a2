"""The work of scripts/generate.py: images of prompts, with scores of a judge."""

import argparse
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paco_grpo.data.prompts import common_fields, json_lines, read_reference, text_of
from paco_grpo.evaluation.evaluate import (
    EvaluationImage,
    evaluation_batches,
    evaluation_latents,
)
from paco_grpo.evaluation.pictures import contact_sheet
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.adapters import add_lora
from paco_grpo.policies.loading import text_length
from paco_grpo.rewards.registry import Reward, build_rewards, write_records
from paco_grpo.sampling.denoise import Sampling
from paco_grpo.sampling.images import decode
from paco_grpo.training.build import apply_speed, find_adapter, load_generator
from paco_grpo.training.checks import (
    check_items,
    check_writable,
    require_promised_gpu,
    with_text_length,
)
from paco_grpo.types import Item
from paco_judge.grid import parse_layout, split_image


def read_items(prompts: list[str], file: Path | None, images: list[Path]) -> list[Item]:
    """Items of prompts given one by one and in a file, with the images they edit."""
    rows: list[tuple[str, dict]] = [("--prompt", {"prompt": prompt}) for prompt in prompts]
    if file is not None and file.suffix == ".jsonl":
        rows += json_lines(file)
    elif file is not None:
        lines = text_of(file).splitlines()
        rows += [(str(file), {"prompt": line}) for line in lines if line.strip()]
    if not rows:
        raise ConfigError("nothing to generate: give --prompt TEXT or --prompts-file FILE")
    if len(images) > 1 and len(images) != len(rows):
        raise ConfigError(
            f"--image is given {len(images)} times for {len(rows)} prompts; give it once, or for "
            "each"
        )
    items = []
    for number, (where, row) in enumerate(rows):
        if images:
            paths = [images[number % len(images)]]
        else:
            folder = file.parent if file is not None else Path()
            paths = [folder / name for name in _reference_names(row, where)]
        references = tuple(read_reference(path, f"{where}: {path}") for path in paths)
        prompt, height, width = common_fields(row, where)
        items.append(Item(number, prompt, height, width, row, references))
    return items


def _reference_names(row: dict, where: str) -> list[str]:
    """Names of the reference images in a row of a prompts file."""
    names = row.get("images")
    if names is None:
        names = [] if row.get("image") is None else [row["image"]]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: image must be a file name, and images a list of file names")
    return names


def prepare(
    options: RunOptions, command: argparse.Namespace, items: list[Item]
) -> tuple[RunOptions, Policy, Reward | None]:
    """Check, and load the model with its adapter.

    Returns options with the text length that applies, the policy, and the judge if there is one.
    """
    require_promised_gpu(os.environ)
    check_items(options, {"given": items})
    adapter = find_adapter(command.adapter, "--adapter") if command.adapter else None
    if command.best is not None and (command.best < 1 or not command.judge):
        raise ConfigError(f"--best {command.best} must be at least 1 and needs --judge URL")
    judge = None
    if command.judge is not None:
        judge = _judge(options, command.judge, items)
    options = with_text_length(options)
    text_length(options, items)  # warns of prompts that will be truncated
    check_writable(command.output, option="--output")
    refuse_earlier_images(command, items)
    policy = load_generator(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if adapter:
        add_lora(policy, lora_path=adapter, option="--adapter")
    apply_speed(options, policy)
    return options, policy, judge


def _judge(options: RunOptions, url: str, items: list[Item]) -> Reward:
    """The configuration's judge for these items, but at ``url``; it has answered."""
    name = "consistency_for_editing" if items[0].num_references else "consistency_score"
    kwargs = dict(options.train.reward_fn_kwargs.get(name, {}))
    kwargs |= {"base_url": url, "host": None, "port": None}
    judge = build_rewards({name: 1.0}, {name: kwargs})[name]
    judge.check_items(items)
    judge.check()
    return judge


def refuse_earlier_images(command: argparse.Namespace, items: list[Item]) -> None:
    """Refuse to write over the images of another command, unless ``--overwrite`` is given."""
    if command.overwrite:
        return
    for item in items:
        for seed in command.seeds:
            path = command.output / image_name(item, seed)
            if path.exists():
                raise ConfigError(
                    f"{path} is there already: choose another --output, or give --overwrite"
                )


def image_name(item: Item, seed: int) -> str:
    """File name of an image."""
    return f"{item.item_id:05d}_seed{seed}.png"


def generate(
    options: RunOptions,
    images: list[EvaluationImage],
    policy: Policy,
    judge: Reward | None,
    command: argparse.Namespace,
) -> int:
    """Write images, a sheet and, with a judge, scores.jsonl; returns the number of images kept."""
    items = [image.item for image in images]
    rows = []
    for item, seed in images:
        name = image_name(item, seed)
        rows.append({"file": name, "prompt": item.prompt, "seed": seed, "kept": True})
    files = [command.output / row["file"] for row in rows]
    pictures = _sample(options, policy, images, files)
    captions = []
    if judge is not None:
        write_records({"judge": judge}, command.output)
        scores = judge(pictures, items)
        if command.best is not None:
            _keep_best(rows, items, scores, command.best)
        for row, score in zip(rows, scores.tolist(), strict=True):
            # A missing score is null.
            row["judge"] = None if math.isnan(score) else score
            caption = "judge –" if math.isnan(score) else f"judge {score:.3f}"
            is_best = command.best is not None and row["kept"]
            captions.append(f"best {caption}" if is_best else caption)
        lines = [json.dumps(row) + "\n" for row in rows]
        (command.output / "scores.jsonl").write_text("".join(lines), encoding="utf-8")
    for row, file, item, picture in zip(rows, files, items, pictures, strict=True):
        if not row["kept"]:
            file.unlink()
        elif command.panels:
            _write_panels(file, item, picture)
    _write_sheet(command.output / "sheet.png", items, pictures, captions)
    return sum(row["kept"] for row in rows)


def _sample(
    options: RunOptions, policy: Policy, images: list[EvaluationImage], files: list[Path]
) -> list[Image.Image]:
    """Sample the images and write them to ``files``."""
    pictures: list = [None] * len(images)
    sampling = Sampling(options.test.num_steps)
    items = [image.item for image in images]
    for batch in evaluation_batches(policy, items, options):
        in_batch = [images[number] for number in batch.numbers]
        latents = evaluation_latents(policy, in_batch, batch, sampling)
        for number, picture in zip(batch.numbers, decode(policy, latents, batch), strict=True):
            if picture is None:
                raise ConfigError(
                    f"{files[number].name} is not finite: look at the weights and "
                    "config.mixed_precision"
                )
            picture.save(files[number], compress_level=1)
            pictures[number] = picture
    return pictures


def _keep_best(rows: list[dict], items: list[Item], scores: np.ndarray, best: int) -> None:
    """Mark as ``kept`` the ``best`` images of each prompt; missing scores come last."""
    ranks: Counter[int] = Counter()
    descending = np.argsort(-np.nan_to_num(scores, nan=-math.inf), kind="stable")
    for position in descending:
        item_id = items[position].item_id
        ranks[item_id] += 1
        rows[position]["kept"] = ranks[item_id] <= best


def _write_panels(file: Path, item: Item, picture: Image.Image) -> None:
    """Write each panel of a grid beside it."""
    layout = parse_layout(item.prompt)
    if math.prod(layout) == 1:
        return
    for number, panel in enumerate(split_image(picture, *layout), 1):
        panel.save(file.with_stem(f"{file.stem}_panel{number}"))


def _write_sheet(
    file: Path, items: list[Item], pictures: list[Image.Image], captions: list[str]
) -> None:
    references = []
    if any(item.image is not None for item in items):
        for item, picture in zip(items, pictures, strict=True):
            # An item without a reference image gets a blank place beside those that have one.
            references.append(item.image or picture.resize((1, 1)))
    contact_sheet(pictures, captions, references).save(file)
