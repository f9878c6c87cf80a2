"""The work of scripts/generate.py: images of prompts, with scores of a judge."""

import argparse
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from paco_grpo.data.prompts import common_fields, json_lines, read_reference, text_of
from paco_grpo.evaluation.evaluate import (
    EvaluationImage,
    evaluation_batches,
    evaluation_latents,
)
from paco_grpo.evaluation.pictures import contact_sheet
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.loading import text_length
from paco_grpo.policies.lora import add_lora
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.sampling.denoise import Sampling
from paco_grpo.sampling.images import Decoder
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
    if file is not None:
        lines = json_lines(file) if file.suffix == ".jsonl" else None
        rows += lines or [
            (str(file), {"prompt": line}) for line in text_of(file).splitlines() if line.strip()
        ]
    if not rows:
        raise ConfigError("nothing to generate: give --prompt TEXT or --prompts-file FILE")
    if len(images) > 1 and len(images) != len(rows):
        raise ConfigError(
            f"--image is given {len(images)} times for {len(rows)} prompts; give it once, or for each"
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


def prepare(options: RunOptions, own: argparse.Namespace, items: list[Item]) -> tuple:
    """Check, and load the model with its adapter: options with the text length that applies, policy, judge or None."""
    require_promised_gpu(os.environ)
    check_items(options, {"given": items})
    adapter = find_adapter(own.adapter, "--adapter") if own.adapter else None
    judge = None
    if own.best is not None and (own.best < 1 or not own.judge):
        raise ConfigError(f"--best {own.best} must be at least 1 and needs --judge URL")
    if own.judge is not None:  # the configuration's own for this kind of model, but at this address
        name = "consistency_for_editing" if items[0].num_images else "consistency_score"
        kwargs = options.train.reward_fn_kwargs.get(name, {}) | {
            "base_url": own.judge,
            "host": None,
            "port": None,
        }
        (judge,) = build_rewards({name: 1.0}, {name: kwargs}).values()
        judge.check_items(items)
        judge.check()
    options = with_text_length(options)
    text_length(options, items)  # warns of prompts that will be truncated
    check_writable(own.output, option="--output")
    refuse_earlier_images(own, items)
    policy = load_generator(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if adapter:
        add_lora(policy, lora_path=adapter)
    apply_speed(options, policy)
    return options, policy, judge


def refuse_earlier_images(own: argparse.Namespace, items: list[Item]) -> None:
    """Refuse to write over the images of another command, unless ``--overwrite`` is given."""
    if own.overwrite:
        return
    for item in items:
        for seed in own.seeds:
            path = own.output / image_name(item, seed)
            if path.exists():
                raise ConfigError(
                    f"{path} is there already: choose another --output, or give --overwrite"
                )


def image_name(item: Item, seed: int) -> str:
    """File name of an image."""
    return f"{item.item_id:05d}_seed{seed}.png"


def generate(
    options: RunOptions,
    wanted: list[EvaluationImage],
    policy: Policy,
    judge,
    own: argparse.Namespace,
) -> int:
    """Write images, a sheet and, with a judge, scores.jsonl (a missing score is null); returns the number kept."""
    items = [item for item, _ in wanted]
    rows = []
    for item, seed in wanted:
        name = image_name(item, seed)
        rows.append({"file": name, "prompt": item.prompt, "seed": seed, "kept": True})
    images: list = [None] * len(wanted)

    def deliver(decoded: list, batch) -> None:
        for i, image in zip(batch.numbers, decoded, strict=True):
            if image is None:
                raise ConfigError(
                    f"{rows[i]['file']} is not finite: look at the weights and config.mixed_precision"
                )
            image.save(own.output / rows[i]["file"], compress_level=1)
            images[i] = image

    sampling = Sampling(options.test.num_steps)
    with Decoder(policy, deliver) as decoder:
        for batch in evaluation_batches(policy, items, options):
            in_batch = [wanted[i] for i in batch.numbers]
            decoder.submit(evaluation_latents(policy, in_batch, batch, sampling), batch)
    captions = []
    if judge:
        write_records({"judge": judge}, own.output)
        scores, better = judge(images, items), Counter()
        for i in np.argsort(-np.nan_to_num(scores, nan=-math.inf), kind="stable"):
            better[items[i].item_id] += 1
            rows[i]["kept"] = own.best is None or better[items[i].item_id] <= own.best
        for row, score in zip(rows, scores.tolist(), strict=True):
            row["judge"] = None if math.isnan(score) else score
            shown = "–" if math.isnan(score) else f"{score:.3f}"
            captions.append(f"{'best ' * (own.best is not None and row['kept'])}judge {shown}")
        (own.output / "scores.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    for row, item, image in zip(rows, items, images, strict=True):
        path = own.output / row["file"]
        if not row["kept"]:
            path.unlink()
        elif own.panels and math.prod(layout := parse_layout(item.prompt)) > 1:
            for number, panel in enumerate(split_image(image, *layout), 1):
                panel.save(path.with_stem(f"{path.stem}_panel{number}"))
    # An item without a reference image gets a blank place beside those that have one.
    references = [
        item.image or image.resize((1, 1)) for item, image in zip(items, images, strict=True)
    ]
    edits = any(item.image is not None for item in items)
    contact_sheet(images, captions, references if edits else ()).save(own.output / "sheet.png")
    return sum(row["kept"] for row in rows)
