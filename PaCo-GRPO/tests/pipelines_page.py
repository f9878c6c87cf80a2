"""Write docs/pipelines.md: what the generic policy does with each pipeline of diffusers."""

import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from any_pipelines import build_any, exclusions, rows
from diffusers import DiffusionPipeline
from PIL import Image
from tiny_policies import FAMILIES, disturb, draw, picture, trainable_parameters
from tiny_run import ROOT, SMALL, overrides_for, rows_of, train, write_edits, write_prompts

from paco_grpo.options import load_options
from paco_grpo.policies import PolicySettings, load_policy
from paco_grpo.policies.adapters import add_lora, save_diffusers
from paco_grpo.policies.base import Policy, PolicyLoadError
from paco_grpo.policies.diffusers_policy import on_white
from paco_grpo.policies.generic import generic_policy
from paco_grpo.policies.loading import POLICIES
from paco_grpo.types import Item

STEPS = 3
PROMPT, OTHER_PROMPT = "a red star", "one big boat and a tree"
SEED, OTHER_SEED = 5, 2**31 + 7
NEGATIVE, OTHER_NEGATIVE = "dull and grey", "bright"
LEAST_EFFECT = 5  # in levels
OBJECTIVES = ("ppo", "nft")


@dataclass(frozen=True)
class Setting:
    """How a tiny pipeline is used."""

    size: tuple[int, int]  # height and width in pixels
    references: int  # images of an item
    prompt: str  # with PROMPT where the text is
    options: dict[str, Any]  # of PolicySettings
    call: dict[str, Any]  # other arguments of the pipeline's call

    @property
    def guides_by_text(self) -> bool:
        return "negative_prompt" in self.options

    def item(self, number: int, prompt: str, first_picture: int = 0) -> Item:
        height, width = self.size
        references = []
        for k in range(self.references):
            references.append(picture(first_picture + k, height, width))
        text = self.prompt.replace("PROMPT", prompt)
        return Item(number, text, height, width, references=tuple(references))


def setting_of(name: str) -> Setting:
    """As any_pipelines.yaml and ``FAMILIES`` have it."""
    row = rows()[name]
    family = FAMILIES.get(row.get("family"))
    options = {"max_sequence_length": 64, "guidance_scale": 2.5}
    options |= family.options if family else {}
    options |= row.get("options", {})
    if "negative_prompt" in options:
        options["negative_prompt"] = NEGATIVE
    return Setting(
        size=tuple(row.get("size", (64, 96))),
        references=family.references if family else row.get("references", 0),
        prompt=row.get("prompt", "PROMPT"),
        options=options,
        call=row.get("call", {}),
    )


@dataclass
class Coverage:
    """What the generic policy does with a tiny pipeline.

    Differences of images are the largest of a pixel, in levels of 255.
    """

    # Of another input on the pipeline's image, and of a LoRA.
    effects: dict[str, int] = field(default_factory=dict)
    difference: int = 0  # from the pipeline's image
    trained: int = 0  # weights of the LoRA with a gradient
    weights: int = 0
    reloaded: int = 0  # difference with the LoRA, from its file in the plain pipeline
    objectives: list[str] = field(default_factory=list)  # which trained an epoch
    reason: str = ""  # why it does not work


def coverage_of(name: str, folder: Path) -> Coverage:
    """Of the pipeline of class ``name``, whose files are written into ``folder``."""
    pipeline_class = getattr(diffusers, name)
    try:
        generic_policy(pipeline_class)
        if "reason" in rows()[name]:
            return Coverage(reason=rows()[name]["reason"])
        with _small_references(pipeline_class):
            return _coverage(name, folder)
    except PolicyLoadError as error:
        return Coverage(reason=str(error).removeprefix(f"{name} cannot be trained: "))


@contextmanager
def _small_references(pipeline_class: type[DiffusionPipeline]) -> Iterator[None]:
    """Editors that bring references to a megapixel bring them to 64² pixels."""
    module = sys.modules[pipeline_class.__module__]
    original = getattr(module, "calculate_dimensions", None)
    if original is None:
        yield
        return
    with mock.patch.object(
        module, "calculate_dimensions", lambda area, aspect: original(area / 256, aspect)
    ):
        yield


def _coverage(name: str, folder: Path) -> Coverage:
    setting = setting_of(name)
    coverage = Coverage()
    build_any(name).save_pretrained(folder / "model")
    policy = load_policy(folder / "model", PolicySettings(**setting.options), "generic")
    pipe = type(policy.pipeline).from_pretrained(folder / "model")
    pipe.set_progress_bar_config(disable=True)
    items = setting.item(0, PROMPT), setting.item(1, OTHER_PROMPT)
    ours = []
    theirs = []
    for item in items:
        ours += draw(policy, [item], [SEED], *setting.size, STEPS)
        theirs.append(_stock_image(pipe, setting, item))
    coverage.effects = _effects(pipe, setting, *theirs)
    coverage.difference = max(map(levels, ours, theirs))

    add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    (changed,) = draw(policy, items[:1], [SEED], *setting.size, STEPS)
    coverage.effects["LoRA"] = levels(changed, ours[0])
    coverage.trained, coverage.weights = _gradients(policy, items[0])
    save_diffusers(policy, folder / "lora")
    load_lora = getattr(pipe, "load_lora_weights", None) or pipe.transformer.load_lora_adapter
    load_lora(str(folder / "lora"), use_safetensors=True)
    coverage.reloaded = levels(changed, _stock_image(pipe, setting, items[0]))
    coverage.objectives = [
        objective
        for objective in OBJECTIVES
        if _trains(name, folder / "model", folder / "runs", objective)
    ]
    return coverage


def _trains(name: str, model: Path, folder: Path, objective: str) -> bool:
    """Whether an epoch of ``objective`` gives the LoRA of the pipeline ``model`` a gradient."""
    setting = setting_of(name)
    resolution = rows()[name].get("resolution", 64)
    changes = SMALL | {
        "pretrained__policy": "generic",
        "train__loss_type": objective,
        "train__resolution": resolution,
        "test__resolution": resolution,
        "run_name": objective,
    }
    for option, value in setting.options.items():
        group = "" if option == "max_sequence_length" else "sample__"
        changes[f"{group}{option}"] = value
    write = partial(_write_prompts, setting)
    overrides = overrides_for(model, folder, write, **changes)
    configuration = "toy_kontext" if setting.references else "toy_t2is"
    options = load_options(f"{ROOT / 'config' / 'grpo.py'}:{configuration}", overrides.items())
    train(options)
    (row,) = rows_of(options, "train")
    return 0 < row["train/grad_norm"] < math.inf


def _write_prompts(setting: Setting, folder: Path) -> None:
    if setting.references:
        write_edits(folder, setting.references)
    else:
        write_prompts(folder)
    for file in folder.glob("*.jsonl"):
        lines = []
        for line in file.read_text().splitlines():
            row = json.loads(line)
            row["prompt"] = setting.prompt.replace("PROMPT", row["prompt"])
            lines.append(json.dumps(row) + "\n")
        file.write_text("".join(lines))
    for number, file in enumerate(sorted(folder.glob("*.png"))):
        picture(number, 64, 128 if number % 2 else 64).save(file)


def _stock_image(
    pipe: DiffusionPipeline, setting: Setting, item: Item, seed: int = SEED, **changes: Any
) -> Image.Image:
    """The plain pipeline's image of ``item``; its arguments come from no policy."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    arguments = setting.options | {"height": item.height, "width": item.width} | changes
    if "true_cfg_scale" in accepted and setting.guides_by_text:
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
    known = {key: value for key, value in arguments.items() if key in accepted}
    images = list(item.images)
    if images:
        name = next(name for name in ("image", "input_images") if name in accepted)
        known[name] = images if len(images) > 1 else images[0]
    output = pipe(
        prompt=item.prompt,
        **known | setting.call,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(seed),
        return_dict=False,
    )
    return output[0][0]


def _effects(
    pipe: DiffusionPipeline, setting: Setting, image: Image.Image, of_other_prompt: Image.Image
) -> dict[str, int]:
    item = setting.item(0, PROMPT)
    others = {"prompt": of_other_prompt, "seed": _stock_image(pipe, setting, item, OTHER_SEED)}
    if setting.guides_by_text:
        others["negative text"] = _stock_image(pipe, setting, item, negative_prompt=OTHER_NEGATIVE)
    if setting.references:
        others["reference"] = _stock_image(pipe, setting, setting.item(0, PROMPT, 50))
    return {cause: levels(image, other) for cause, other in others.items()}


def _gradients(policy: Policy, item: Item) -> tuple[int, int]:
    """The numbers of trainable weights with a gradient and of all."""
    latents = policy.initial_latents([3], *item.size)
    velocity = policy.velocity(latents, torch.tensor([0.6]), policy.encode([item]), *item.size)
    velocity.square().mean().backward()
    weights = trainable_parameters(policy)
    trained = [weight for weight in weights if weight.grad is not None and weight.grad.any()]
    return len(trained), len(weights)


def levels(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of two images."""
    a, b = (np.asarray(on_white(image), dtype=int) for image in (one, other))
    return int(np.abs(a - b).max())


_INTRODUCTION = """\
# Pipelines of diffusers

To train a model whose `model_index.json` names one of these pipelines, start the configuration
`any_t2is` (from text to image) or `any_editing` (from an image and a text) with
`--config.pretrained.model=NAME`. [any-model.md](any-model.md) says what is checked for you, and what
you must choose.

These are all flow-matching pipelines of diffusers {version} that draw or edit an image, but not those
that {excluded}. One with a policy of its own gets it, because it is faster. The other columns are of
`--config.pretrained.policy=generic`, with tiny random weights, two prompts and guidance
(`python PaCo-GRPO/tests/pipelines_page.py > docs/pipelines.md`). Differences are the largest of a
pixel, in levels of 255:

- image: from the pipeline's own call;
- LoRA: weights with a gradient, of all; the others do not reach the image (text of the last block,
  experts that no token chose, references that are not given);
- reload: with a LoRA, from its file in the plain pipeline;
- trains: objectives that ran an epoch;
- effects, to compare with: of another prompt / seed / negative text / reference on the pipeline's
  image.

| pipeline | own policy | generic | image | LoRA | reload | trains | effects |
|---|---|---|---|---|---|---|---|
"""


def page(coverages: Mapping[str, Coverage]) -> str:
    """docs/pipelines.md."""
    kinds = list(exclusions().values())
    excluded = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    lines = [_INTRODUCTION.format(version=diffusers.__version__, excluded=excluded)]
    lines += [f"{line_of(name, coverages[name])}\n" for name in sorted(coverages)]
    return "".join(lines)


def line_of(name: str, coverage: Coverage) -> str:
    """A row of the table."""
    own = "yes" if name in POLICIES else ""
    if coverage.reason:
        return f"| {name} | {own} | no: {coverage.reason} | | | | | |"
    causes = ("prompt", "seed", "negative text", "reference")
    cells = [
        name,
        own,
        "yes",
        str(coverage.difference),
        f"{coverage.trained}/{coverage.weights}",
        str(coverage.reloaded),
        ", ".join(coverage.objectives),
        " / ".join(str(coverage.effects.get(cause, "–")) for cause in causes),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the page."""
    coverages = {}
    for name in sorted(rows()):
        with TemporaryDirectory() as folder:
            coverages[name] = coverage_of(name, Path(folder))
    print(page(coverages), end="")


if __name__ == "__main__":
    main()
