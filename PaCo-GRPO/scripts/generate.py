"""Make images with a trained adapter, at any resolution, with the same sampler as the evaluation.

python scripts/generate.py --config config/grpo.py:NAME [--config.a.b=value …] --adapter DIR --prompt TEXT [--prompt TEXT …]
    --adapter DIR        a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for the base model
    --prompts-file FILE  one prompt a line, or a *_metadata.jsonl (its images are relative to its folder)
    --image FILE         what to edit: once for all prompts, or once for each --prompt in their order
    --seeds 0,1,2        one image per prompt and seed        --output DIR   default: generated
    --judge URL          scores by the judge there, on the sheet and in scores.jsonl; --judge-model NAME if not the
                         configuration's
    --no_user_code       refuse a configuration that names code outside this repository
Resolution, steps and batch size are config.test.{resolution,num_steps,batch_size}.
"""

import argparse
import dataclasses
import json
import logging
import math
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts-file", type=Path)
    parser.add_argument("--image", action="append", default=[], type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--output", type=Path, default=Path("generated"))
    parser.add_argument("--judge")
    parser.add_argument("--judge-model")
    own, rest = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    from paco_grpo.options import read_options
    from paco_grpo.training.build import REFUSALS
    from paco_grpo.training.checks import is_disk_full

    try:
        options, _ = read_options(rest)
        items = read_items(own.prompt, own.prompts_file, own.image)
        options, wanted, policy, judge = prepare(options, own, items)
    except (*REFUSALS, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        generate(options, wanted, policy, judge, own.output)
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"error: the disk is full ({error}); free some space, or choose another --output", file=sys.stderr)
        return 2
    print(f"{len(wanted)} images and sheet.png in {own.output}")
    return 0


def read_items(prompts: list[str], file: Path | None, images: list[Path]) -> list:
    """Items of prompts given one by one and in a file, with the images they edit.

    Raises:
        ConfigError: The numbers of images and prompts do not fit.
        DataError: The file cannot be read; the message names line and field.
    """
    from paco_grpo.data.files import DataError, given_size, json_lines, prompt_of, text_of
    from paco_grpo.options import ConfigError
    from paco_grpo.types import Item
    from paco_judge.images import UnreadableImage, read_image

    if file is not None and not file.is_file():
        raise ConfigError(f"--prompts-file {file} does not exist")
    rows: list[tuple[str, dict]] = [("--prompt", {"prompt": prompt}) for prompt in prompts]
    if file is not None and file.suffix == ".jsonl":
        rows += json_lines(file)
    elif file is not None:
        rows += [(str(file), {"prompt": line}) for line in text_of(file).splitlines() if line.strip()]
    if not rows:
        raise ConfigError("nothing to generate: give --prompt TEXT or --prompts-file FILE")
    if len(images) > 1 and len(images) != len(rows):
        raise ConfigError(f"--image is given {len(images)} times for {len(rows)} prompts; give it once, or for each")
    items = []
    for number, (where, row) in enumerate(rows):
        paths = [images[number if len(images) > 1 else 0]] if images else []
        if not paths:
            paths = [file.parent / name for name in row.get("images") or [row.get("image")] if name]
        own = []
        for path in paths:
            try:
                own.append(read_image(path, upright=True))
            except UnreadableImage as error:
                raise DataError(f"{where}: image {path} {error}") from error
        first, *more = own or [None]
        given = {"metadata": row, "image": first, "more_images": tuple(more)}
        items.append(Item(number, prompt_of(row, where), *given_size(row, where), **given))
    return items


def prepare(options, own: argparse.Namespace, items: list) -> tuple:
    """Check, and load the model with its adapter.

    Returns:
        The options with the text length that applies; an (item, seed) for each image; the policy; the judge or None.

    Raises:
        ConfigError, PolicyLoadError, JudgeError, DataError: One clear message each.
    """
    import torch

    from paco_grpo.data.prompts import load_prompts
    from paco_grpo.options import ConfigError
    from paco_grpo.policies import policy_class
    from paco_grpo.rewards.registry import build_rewards
    from paco_grpo.training.build import apply_speed, load_adapter, load_generator
    from paco_grpo.training.checks import check_device, text_length

    model, judge = options.pretrained.model, None
    try:
        seeds = [int(seed) for seed in own.seeds.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {own.seeds} is not a list such as 0,1,2") from error
    policy = policy_class(model)
    edits_images = any(item.num_images for item in items)
    for item in items:
        if policy.needs_image and not item.num_images:
            raise ConfigError(f"{model} edits images: give --image FILE (prompt {item.prompt[:40]!r} has none)")
        if item.num_images and not policy.edits_images:
            raise ConfigError(f"{model} generates from text alone: leave out --image, or choose an editing model")
        if item.num_images > 1 and not policy.several_images:
            raise ConfigError(f"{model} edits one image, but prompt {item.prompt[:40]!r} has {item.num_images}")
    if own.judge is not None:  # the configuration's own for this kind of model, but at this address
        name = "consistency_for_editing" if edits_images else "consistency_score"
        kwargs = options.train.reward_fn_kwargs.get(name, {}) | {"base_url": own.judge, "host": None, "port": None}
        kwargs |= {"model": own.judge_model} if own.judge_model else {}
        (judge,) = build_rewards({name: 1.0}, {name: kwargs}).values()
        judge.check()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.max_sequence_length == 0:  # as the run was trained, whatever the length of these prompts
        sets = [load_prompts(options.dataset, split, options.prompt_fn) for split in ("train", "test")]
        options = dataclasses.replace(options, max_sequence_length=text_length(options, [*sets[0], *sets[1]]))
    text_length(options, items)
    check_device(options, device)
    policy = load_generator(options, device)
    if own.adapter:
        load_adapter(policy, own.adapter)
    apply_speed(options, policy)
    return options, [(item, seed) for item in items for seed in seeds], policy, judge


def generate(options, wanted: list, policy, judge, output: Path) -> None:
    """Write an image for each of ``wanted``, scores.jsonl if there is a judge (a missing score is null), and a sheet."""
    from paco_grpo.evaluation.evaluate import test_batches, test_inputs
    from paco_grpo.evaluation.pictures import contact_sheet
    from paco_grpo.sampling.images import sample_images

    output.mkdir(parents=True, exist_ok=True)
    items = [item for item, _ in wanted]
    names = [f"{item.item_id:05d}_seed{seed}.png" for item, seed in wanted]
    images: list = [None] * len(wanted)

    def deliver(decoded: list, batch) -> None:
        for i, image in zip(batch.numbers, decoded, strict=True):
            if image is None:
                raise SystemExit(f"error: {names[i]} is not finite: look at the weights and config.mixed_precision")
            image.save(output / names[i])
            images[i] = image

    for _ in sample_images(
        policy,
        ((batch, False) for batch in test_batches(policy, items, options)),
        lambda batch: test_inputs(policy, [wanted[i] for i in batch.numbers], batch),
        deliver,
        num_steps=options.test.num_steps,
    ):
        pass
    captions, lines = [], []
    for name, (item, seed), score in zip(names, wanted, judge(images, items).tolist(), strict=True) if judge else ():
        known = None if math.isnan(score) else score
        lines.append(json.dumps({"file": name, "prompt": item.prompt, "seed": seed, "judge": known}) + "\n")
        captions.append("judge –" if known is None else f"judge {score:.3f}")
    if judge:
        from paco_grpo.rewards.registry import write_records

        write_records({"judge": judge}, output)
        (output / "scores.jsonl").write_text("".join(lines), encoding="utf-8")
    contact_sheet(images, captions, [item.image for item in items if item.image is not None]).save(output / "sheet.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
