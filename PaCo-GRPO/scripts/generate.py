"""Make images with a trained adapter, at any resolution, with the same sampler as the evaluation.

python scripts/generate.py --config config/grpo.py:NAME [--config.a.b=value …] --adapter DIR --prompt TEXT [--prompt TEXT …]
    --adapter DIR        a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for the base model
    --prompts-file FILE  one prompt a line, or a *_metadata.jsonl (its images are relative to its folder)
    --image FILE         what to edit: once for all prompts, or once for each --prompt in their order
    --seeds 0,1,2        one image per prompt and seed        --output DIR   default: generated
    --judge URL          scores by the judge there, on the sheet and in scores.jsonl; --judge-model NAME if not the
                         configuration's
Resolution, steps and batch size are config.test.{resolution,num_steps,batch_size}.
"""

import argparse
import dataclasses
import json
import logging
import math
import sys
from pathlib import Path


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the rest, which is the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompts-file", type=Path)
    parser.add_argument("--image", action="append", default=[], type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--output", type=Path, default=Path("generated"))
    parser.add_argument("--judge")
    parser.add_argument("--judge-model")
    return parser.parse_known_args(arguments)


def read_items(prompts: list[str], file: Path | None, images: list[Path]) -> list:
    """Items of prompts given one by one and in a file, with the images they edit.

    Raises:
        ConfigError: The numbers of images and prompts do not fit.
        DataError: The file cannot be read; the message names line and field.
    """
    from paco_grpo.data.files import given_size, json_lines, prompt_of, text_of
    from paco_grpo.options import ConfigError
    from paco_grpo.types import Item

    if file is not None and not file.is_file():
        raise ConfigError(f"--prompts-file {file} does not exist")
    rows: list[tuple[str, dict]] = [("--prompt", {"prompt": prompt}) for prompt in prompts]
    if file is not None and file.suffix == ".jsonl":
        rows += json_lines(file)
    elif file is not None:
        rows += [(str(file), {"prompt": line}) for line in text_of(file).splitlines() if line.strip()]
    if len(images) > 1 and len(images) != len(rows):
        raise ConfigError(f"--image is given {len(images)} times for {len(rows)} prompts; give it once, or for each")
    items = []
    for number, (where, row) in enumerate(rows):
        path = images[number if len(images) > 1 else 0] if images else None
        if path is None and row.get("image"):
            path = file.parent / row["image"]
        image = read_image(path) if path is not None else None
        items.append(Item(number, prompt_of(row, where), *given_size(row, where), metadata=row, image=image))
    return items


def read_seeds(text: str) -> list[int]:
    """Integers separated by commas.

    Raises:
        ConfigError: Anything else.
    """
    from paco_grpo.options import ConfigError

    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text} is not a list such as 0,1,2") from error


def read_image(path: Path):
    """An RGB image, upright."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def check_images(items: list, model: str) -> None:
    """Editors need an image for every prompt, the others take none.

    Raises:
        ConfigError: It is otherwise.
    """
    from paco_grpo.options import ConfigError
    from paco_grpo.policies import policy_class

    edits = policy_class(model).edits_images
    wrong = [item for item in items if (item.image is None) == edits]
    if wrong and edits:
        raise ConfigError(f"{model} edits images: give --image FILE (prompt {wrong[0].prompt[:40]!r} has none)")
    if wrong:
        raise ConfigError(f"{model} generates from text alone: leave out --image, or choose an editing model")


def judge_reward(options, edits_images: bool, url: str | None, model: str | None):
    """The judge that ``options`` has for this kind of model, but at ``url``; None without one.

    Raises:
        JudgeError: No judge answers there.
    """
    if url is None:
        return None
    from paco_grpo.rewards.registry import build_rewards

    name = "consistency_for_editing" if edits_images else "consistency_score"
    kwargs = options.train.reward_fn_kwargs.get(name, {}) | {"base_url": url}
    (reward,) = build_rewards({name: 1.0}, {name: kwargs | ({"model": model} if model else {})}).values()
    reward.check()
    return reward


def write_scores(scores: list, wanted: list, names: list[str], output: Path) -> list[str]:
    """Write scores.jsonl and return the sheet's captions; a missing score is null and a dash."""
    with (output / "scores.jsonl").open("w", encoding="utf-8") as file:
        for name, (item, seed), score in zip(names, wanted, scores, strict=True):
            known = None if math.isnan(score) else float(score)
            file.write(json.dumps({"file": name, "prompt": item.prompt, "seed": seed, "judge": known}) + "\n")
    return ["judge –" if math.isnan(score) else f"judge {score:.3f}" for score in scores]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    own, rest = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    import torch

    from paco_grpo.data.prompts import DataError, load_prompts
    from paco_grpo.evaluation.evaluate import test_batches, test_inputs
    from paco_grpo.evaluation.pictures import contact_sheet
    from paco_grpo.options import ConfigError, read_options
    from paco_grpo.policies import PolicyLoadError, policy_class
    from paco_grpo.rewards.registry import RewardError
    from paco_grpo.sampling.images import sample_images
    from paco_grpo.training.build import apply_speed, load_adapter, load_generator
    from paco_grpo.training.checks import check_device, text_length
    from paco_judge.client import JudgeError

    try:
        options, _ = read_options(rest)
        items, seeds = read_items(own.prompt, own.prompts_file, own.image), read_seeds(own.seeds)
        if not items:
            raise ConfigError("nothing to generate: give --prompt TEXT or --prompts-file FILE")
        check_images(items, options.pretrained.model)
        edits_images = policy_class(options.pretrained.model).edits_images
        judge = judge_reward(options, edits_images, own.judge, own.judge_model)
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
    except (ConfigError, DataError, PolicyLoadError, JudgeError, RewardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = [(item, seed) for item in items for seed in seeds]
    own.output.mkdir(parents=True, exist_ok=True)
    names = [f"{item.item_id:05d}_seed{seed}.png" for item, seed in wanted]
    images: list = [None] * len(wanted)

    def deliver(decoded: list, batch) -> None:
        for i, image in zip(batch.numbers, decoded, strict=True):
            image.save(own.output / names[i])
            images[i] = image

    batches = test_batches(policy, [item for item, _ in wanted], options)
    for _ in sample_images(
        policy,
        ((batch, False) for batch in batches),
        lambda batch: test_inputs(policy, [wanted[i] for i in batch.numbers], batch),
        deliver,
        num_steps=options.test.num_steps,
    ):
        pass
    captions = []
    if judge is not None:
        captions = write_scores(judge(images, [item for item, _ in wanted]).tolist(), wanted, names, own.output)
    references = [item.image for item, _ in wanted] if edits_images else []
    contact_sheet(images, captions, references).save(own.output / "sheet.png")
    print(f"{len(images)} images and sheet.png in {own.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
