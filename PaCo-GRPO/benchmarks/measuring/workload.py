"""What an epoch consists of: configuration, prompt set and model folder, made in place; and the published amount of work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ml_collections import ConfigDict
from PIL import Image

from measuring.architectures import PRESETS, Architecture
from measuring.generators import write
from measuring.words import t2is_prompts
from paco_grpo.policies.flux import FluxConditioning, FluxPolicy
from paco_grpo.sampling.rollout import record_transition
from paco_grpo.training.configuration import ConfigError, apply_overrides, load_config
from paco_grpo.training.setup import Run
from paco_grpo.types import Item, RolloutRecord

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "config" / "base.py"
TOY = ROOT.parent / "quickstart" / "models" / "flux"
# Side of an image where --resolution does not say; those of the published configurations for the real models.
RESOLUTIONS = {
    "tiny": 32, "toy": 64, "narrow": 128, "flux-small": 256, "flux-dev": 512, "kontext-dev": 384, "qwen-edit": 384,
}  # fmt: skip
_CONFIGS = {"flux": "t2is", "flux_kontext": "kontext_editing", "qwen_image_edit": "qwen_editing"}
# Work of an epoch; what is None is the configuration's. "counting" is the setting of tests/training/test_cost.py.
WORKLOADS: dict[str, dict[str, int | None]] = {
    "config": {"k": None, "m": None, "steps": None, "train_steps": None},
    "counting": {"k": 8, "m": 8, "steps": 10, "train_steps": 1},
    "published": {"k": 8, "m": 8, "steps": 10, "train_steps": 1},
}
# Images through each part in an epoch of 64 images, 8 prompts, 10 steps, 1 trained, PPO without KL: the published
# implementation as counted in its code, and ours.
PUBLISHED_CALLS = {"transformer": 832, "text_encoder": 256, "text_encoder_2": 256, "decoder": 128, "backward": 64}
OUR_CALLS = {"transformer": 704, "text_encoder": 8, "text_encoder_2": 8, "decoder": 64, "backward": 64}


@dataclass(frozen=True)
class Workload:
    """Settings of a benchmark's epoch.

    Attributes:
        preset: A key of RESOLUTIONS.
        name: A key of WORKLOADS.
        resolution: Pixels a side.
        k: Images a prompt; None = the configuration's, as in what follows.
        m: Prompts an epoch.
        steps: Denoising steps.
        train_steps: Noisy steps, all of them trained on.
        batch: Images a forward of the rollout.
        train_batch: Images a forward of training.
        blocks: Fraction of the preset's blocks.
        width: Fraction of the preset's heads.
        reward_seconds: Waited for each image; None = the JPEG reward.
        judge: URL of a judge to ask instead.
        judge_model: The name it serves.
    """

    preset: str
    name: str = "counting"
    resolution: int | None = None
    k: int | None = None
    m: int | None = None
    steps: int | None = None
    train_steps: int | None = None
    batch: int = 16
    train_batch: int = 16
    blocks: float = 1.0
    width: float = 1.0
    reward_seconds: float | None = None
    judge: str | None = None
    judge_model: str = "PaCo-Reward-7B"

    def resolved(self) -> Workload:
        """With the resolution and the work that preset and name stand for."""
        given = {key: value for key in WORKLOADS[self.name] if (value := getattr(self, key)) is not None}
        work = WORKLOADS[self.name] | given
        return dataclasses.replace(self, resolution=self.resolution or RESOLUTIONS[self.preset], **work)

    def architecture(self) -> Architecture:
        """Of the preset; the toy's is read from its folder (for counting: its weights are the trained ones)."""
        if self.preset == "toy":
            return _toy_architecture()
        return PRESETS[self.preset].scaled(self.blocks, self.width)


def _toy_architecture() -> Architecture:
    def part(name: str) -> dict:
        values = json.loads((TOY / name / "config.json").read_text())
        return {key: value for key, value in values.items() if not key.startswith("_") and value is not None}

    def chosen(values: dict, like: dict) -> dict:
        return {key: values[key] for key in like if key in values}

    flux = PRESETS["flux-dev"]
    vae = {"mid_block_add_attention", *flux.vae}
    return Architecture(
        family="flux",
        transformer=chosen(part("transformer"), flux.transformer),
        text=chosen(part("text_encoder_2"), flux.text),
        clip=chosen(part("text_encoder"), flux.clip),
        vae={key: value for key, value in part("vae").items() if key in vae},
    )


def make_config(work: Workload, folder: Path, prompts: int, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """The configuration of ``work`` (resolved), with its prompt set in ``folder``.

    Args:
        work: What to do.
        folder: Made if it is not there; ``folder / "runs"`` gets the run. The model is beside it, for all settings.
        prompts: Size of the prompt set; m for each epoch keeps every text new.
        overrides: (option, text) pairs that come last.

    Raises:
        ConfigError: An unknown option or a wrong value.
    """
    architecture = work.architecture()
    editing = architecture.family != "flux"
    source = "toy_t2is" if work.preset == "toy" else _CONFIGS[architecture.family]
    config = load_config(f"{ROOT / 'config' / 'grpo.py'}:{source}", BASE)
    model = TOY if work.preset == "toy" else write(architecture, folder.parent / "model")
    (_write_edits if editing else _write_prompts)(folder / "prompts", prompts, work.resolution)
    given = {
        "pretrained.model": model, "dataset": folder / "prompts", "save_dir": folder / "runs", "run_name": "run",
        "prompt_fn": "geneval_image" if editing else "geneval", "item_size": "aspect", "logging_platform": "none",
        "save_freq": 0, "eval_freq": 0, "test.at_start": False, "health.probe_images": 0, "max_train_minutes": "None",
        "train.resolution": work.resolution, "test.resolution": work.resolution, "train.learning_rate": 1e-5,
        "sample.batch_size": work.batch, "train.batch_size": work.train_batch,
        "sample.same_latent": False, "sample.merge_lora": False, "sample.global_std": False,
        "mixed_precision": "bf16" if torch.cuda.is_available() else "no",
        "test.reward_fn": "{}", "test.reward_fn_kwargs": "{}", "num_epochs": 1_000_000,
    }  # fmt: skip
    if work.preset in ("tiny", "narrow"):
        given |= {"train.lora_rank": 8, "train.lora_alpha": 16}
    if work.preset == "tiny":
        given["max_sequence_length"] = 32
    given |= _reward(work)
    named = {"k": "num_images_per_prompt", "m": "unique_sample_num_per_epoch", "steps": "num_steps"}
    given |= {f"sample.{key}": getattr(work, name) for name, key in named.items() if getattr(work, name) is not None}
    if work.train_steps is not None:
        given["sample.noise_steps"] = ",".join(str(1 + step) for step in range(work.train_steps))
    apply_overrides(config, [*((key, str(value)) for key, value in given.items()), *overrides])
    return config


def _reward(work: Workload) -> dict[str, str]:
    if work.judge:
        kwargs = {"base_url": work.judge, "model": work.judge_model}
        table, arguments = {"consistency_score": 1.0}, {"consistency_score": kwargs}
    elif work.reward_seconds is not None:
        name = "measuring.rewards:sleeping"
        table, arguments = {name: 1.0}, {name: {"seconds_per_image": work.reward_seconds}}
    else:
        table, arguments = {"jpeg_compressibility": 1.0}, {}
    return {"train.reward_fn": repr(table), "train.reward_fn_kwargs": repr(arguments)}


def _write_prompts(folder: Path, count: int, resolution: int) -> None:
    """T2IS prompts, each with a number of its own, so that no text has been encoded before."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = t2is_prompts()
    for split, rows in (("train", count), ("test", 1)):
        lines = [json.dumps({"prompt": f"{texts[i % len(texts)]} ({split} {i})"}) for i in range(rows)]
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(lines) + "\n")


def _write_edits(folder: Path, count: int, resolution: int) -> None:
    """Instructions with a smooth random picture each."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", count), ("test", 1)):
        lines = []
        for i in range(rows):
            pixels = np.random.default_rng(i).integers(0, 256, (6, 6, 3), dtype=np.uint8)
            name = f"{split}{i}.png"
            Image.fromarray(pixels).resize((resolution, resolution), Image.Resampling.BICUBIC).save(folder / name)
            text = f"Make thing number {i} red, larger and closer to the window; keep all else as it is."
            lines.append(json.dumps({"prompt": text, "image": name}))
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(lines) + "\n")


# --- the published amount of work -------------------------------------------------------------------------------------


# What goes with it: encoders that are asked for every image stay where they compute.
PUBLISHED_OVERRIDES = (("speed.offload_text_encoders", "false"),)


def repeat_published_work(run: Run) -> None:
    """Make ``run`` compute as often as the published implementation does; a model of its work, not its code.

    Every text is encoded for each image, and again for each of three training forwards (old policy, reference policy
    although its weight is 0, and the one with gradient); every image is decoded twice. Kernels, batches and precision
    are ours.

    Raises:
        ConfigError: Not FLUX text to image on one process, or not PPO: that is what was counted.
    """
    policy, updater = run.policy, run.updater
    if not isinstance(policy, FluxPolicy) or policy.edits_images or run.config.train.loss_type != "ppo":
        raise ConfigError("the published amount of work is known for FLUX text to image with loss_type=ppo")
    if run.accelerator.num_processes > 1:
        raise ConfigError("the published amount of work is measured on one process")
    decode, objective, batch = policy.decode, updater.objective, run.plan.sample_batch_size

    def encode_texts(prompts: Sequence[str]) -> FluxConditioning:
        with torch.no_grad(), policy.text_at_work():
            embeds, pooled, _ = policy.pipeline.encode_prompt(
                list(prompts), device=policy.device, max_sequence_length=policy.max_sequence_length
            )
        return FluxConditioning(embeds.to(policy.dtype), pooled.to(policy.dtype))

    def encode(items: Sequence[Item]) -> FluxConditioning:
        per_image = [item.prompt for item in items for _ in range(run.plan.images_per_prompt)]
        parts = [encode_texts(per_image[i : i + batch]) for i in range(0, len(per_image), batch)]
        return FluxConditioning.cat(parts).select(slice(0, None, run.plan.images_per_prompt))

    def decode_twice(latents: torch.Tensor, height: int, width: int) -> list:
        decode(latents, height, width)
        return decode(latents, height, width)

    def three_forwards(record: RolloutRecord, policy: FluxPolicy, config: ConfigDict):
        prompts = [run.train_items[i].prompt for i in record.item_ids.tolist()]
        for position in range(len(record.step_index)):
            with torch.no_grad():
                record_transition(policy, dataclasses.replace(record, conditioning=encode_texts(prompts)), position)
                with policy.reference():
                    record_transition(policy, dataclasses.replace(record, conditioning=encode_texts(prompts)), position)
        return objective(dataclasses.replace(record, conditioning=encode_texts(prompts)), policy, config)

    policy.encode, policy.decode, updater.objective = encode, decode_twice, three_forwards
