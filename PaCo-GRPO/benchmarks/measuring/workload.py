"""What a measured epoch consists of: configuration, prompt set and model, created in a temporary folder."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.options import ConfigError, RunOptions, read_options
from paco_grpo.policies.lora import reference
from paco_grpo.rehearsal.architectures import PRESETS, Architecture
from paco_grpo.rehearsal.models import random_weights, t2is_prompts, write

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT.parent / "quickstart" / "models" / "flux"
# Pixels of an image without --resolution; for the real models those of the published configurations.
RESOLUTIONS = {
    "tiny": 32, "toy": 64, "narrow": 128, "flux-small": 256, "flux-dev": 512, "kontext-dev": 384, "qwen-edit": 384,
}  # fmt: skip
_CONFIGS = {
    "FluxPipeline": "t2is", "FluxKontextPipeline": "kontext_editing", "QwenImageEditPipeline": "qwen_editing",
}  # fmt: skip
# Work of an epoch; what is missing is the configuration's own. "counting" is the setting of tests/training/test_cost.py.
WORKLOADS: dict[str, dict[str, int]] = {
    "config": {},
    "counting": {"k": 8, "m": 8, "steps": 10, "train_steps": 1},
}
# Images through each part in an epoch of 64 images, 8 prompts, 10 steps, 1 trained, PPO without KL: counted in the
# code of the published implementation, and ours.
PUBLISHED_CALLS = {"transformer": 832, "text_encoder": 256, "text_encoder_2": 256, "decoder": 128, "backward": 64}
OUR_CALLS = {"transformer": 704, "text_encoder": 8, "text_encoder_2": 8, "decoder": 64, "backward": 64}


def resolve(given: argparse.Namespace) -> argparse.Namespace:
    """The arguments of epoch.py with resolution, k, m, steps and train_steps filled in; None = the configuration's."""
    found = argparse.Namespace(**vars(given))
    found.resolution = found.resolution or RESOLUTIONS[found.preset]
    for name, value in WORKLOADS[found.workload].items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    return found


def architecture_of(work: argparse.Namespace) -> Architecture:
    """The preset's architecture; the toy's is read from its folder."""
    if work.preset != "toy":
        return PRESETS[work.preset].scaled(work.blocks, work.width)
    flux = PRESETS["flux-dev"].with_modules(vae={"mid_block_add_attention": True})

    def part(name: str, like: dict[str, Any]) -> dict[str, Any]:
        values = json.loads((TOY / name / "config.json").read_text())
        return {key: values[key] for key in like if values.get(key) is not None}

    return flux.with_modules(**{name: part(name, module.config) for name, module in flux.modules.items()})


def prepare(
    work: argparse.Namespace, architecture: Architecture, folder: Path, epochs: int, overrides: Sequence[str] = ()
) -> tuple[RunOptions, AbstractContextManager]:
    """The options of ``work`` (from ``resolve``), and the context in which their model can be loaded.

    Args:
        architecture: The generator that ``work`` names. The toy keeps its trained weights; all others are random.
        folder: Gets the model, the prompts and the run.
        epochs: Epochs to come; every one gets prompts that were not encoded before.
        overrides: ``--config.a.b=value`` options that come last.

    Raises:
        ConfigError: An unknown option or a wrong value.
    """
    toy, editing = work.preset == "toy", architecture.editing
    model, context = TOY, nullcontext()
    if not toy:
        model, context = write(architecture, folder / "model"), random_weights(architecture)
    given: dict[str, Any] = {
        "pretrained.model": model, "dataset": folder / "prompts", "save_dir": folder / "runs", "run_name": "run",
        "prompt_fn": "geneval_image" if editing else "geneval", "item_size": "aspect", "logging_platform": "none",
        "save_freq": 0, "eval_freq": 0, "test.at_start": False, "health.probe_images": 0, "max_train_minutes": None,
        "train.resolution": work.resolution, "test.resolution": work.resolution, "train.learning_rate": 1e-5,
        "sample.batch_size": work.batch, "train.batch_size": work.train_batch,
        "sample.same_latent": False, "sample.global_std": False,
        "mixed_precision": "bf16" if torch.cuda.is_available() else "no",
        "test.reward_fn": {}, "test.reward_fn_kwargs": {}, "num_epochs": 1_000_000,
    }  # fmt: skip
    if work.preset in ("tiny", "narrow"):
        given |= {"train.lora_rank": 8, "train.lora_alpha": 16}
    if work.preset == "tiny":
        given["max_sequence_length"] = 32
    reward, arguments = "jpeg_compressibility", {}
    if work.judge:
        reward, arguments = "consistency_score", {"base_url": work.judge, "model": work.judge_model}
    elif work.reward_seconds is not None:
        reward, arguments = f"{__name__}:waiting_reward", {"seconds_per_image": work.reward_seconds}
    given |= {"sample.latents_per_prompt": 1, "train.aggregate_fn": None}
    given |= {"train.reward_fn": {reward: 1.0}, "train.reward_fn_kwargs": {reward: arguments} if arguments else {}}
    names = {"k": "num_images_per_prompt", "m": "unique_sample_num_per_epoch", "steps": "num_steps"}
    given |= {f"sample.{key}": getattr(work, name) for name, key in names.items() if getattr(work, name) is not None}
    if work.train_steps is not None:
        given["sample.noise_steps"] = ",".join(str(1 + step) for step in range(work.train_steps))
    source = f"{ROOT / 'config' / 'grpo.py'}:{'toy_t2is' if toy else _CONFIGS[architecture.pipeline]}"
    options = [f"--config.{key}={value}" for key, value in given.items()]
    found, _ = read_options(["--config", source, *options, *overrides])
    # twice as many as asked for: the plan of several processes may raise m
    count = 2 * epochs * found.sample.unique_sample_num_per_epoch
    _write_items(folder / "prompts", count, work.resolution if editing else None)
    return found, context


def waiting_reward(seconds_per_image: float = 0.1) -> Callable[[Sequence, Sequence], np.ndarray]:
    """A reward factory: mean gray of each image in [0, 1], (n,), after waiting ``seconds_per_image`` for each."""

    def score(images: Sequence, items: Sequence) -> np.ndarray:
        time.sleep(seconds_per_image * len(images))
        return np.array([np.asarray(image.convert("L")).mean() / 255 for image in images])

    return score


def _write_items(folder: Path, count: int, resolution: int | None) -> None:
    """T2IS prompts, or with a ``resolution`` instructions with a smooth random picture each; no text occurs twice."""
    folder.mkdir(parents=True)
    texts = t2is_prompts()
    for split, rows in (("train", count), ("test", 1)):
        lines = []
        for i in range(rows):
            row = {"prompt": f"{texts[i % len(texts)]} ({split} {i})"}
            if resolution:
                coarse = Image.fromarray(np.random.default_rng(i).integers(0, 256, (6, 6, 3), dtype=np.uint8))
                coarse.resize((resolution, resolution), Image.Resampling.BICUBIC).save(folder / f"{split}{i}.png")
                text = f"Make thing number {i} red, larger and closer to the window; keep all else as it is."
                row = {"prompt": text, "image": f"{split}{i}.png"}
            lines.append(json.dumps(row))
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(lines) + "\n")


# --- the published amount of work -------------------------------------------------------------------------------------


def repeat_published_work(run: Any) -> None:
    """Make ``run`` compute as often as the published implementation: a model of its amount of work, not its code.

    Every text is encoded for each image, and again for each of three training forwards (old policy, reference policy
    although its weight is 0, and the one with gradient); every image is decoded twice. Kernels, batches and precision
    are ours.

    Args:
        run: With ``speed.offload_text_encoders=false``.

    Raises:
        ConfigError: Not FLUX text-to-image with PPO on one process, which is what was counted.
    """
    policy, batch = run.state.policy, run.plan.sample_batch_size
    pipeline = policy.pipeline
    if type(pipeline).__name__ != "FluxPipeline" or run.options.train.loss_type != "ppo":
        raise ConfigError("work=published is known for FLUX text to image with loss_type=ppo")
    if run.accelerator.num_processes > 1:
        raise ConfigError("work=published is measured on one process")
    encode, decode, prompts = policy.encode, policy.decode, []

    @torch.no_grad()
    def encode_texts(texts: Sequence[str]) -> None:
        length = {"device": policy.device, "max_sequence_length": policy.max_sequence_length}
        for i in range(0, len(texts), batch):
            pipeline.encode_prompt(list(texts[i : i + batch]), **length)

    def encode_each_image(items: Sequence) -> Any:
        prompts[:] = [item.prompt for item in items]
        encode_texts(prompts * (run.plan.images_per_prompt - 1))
        return encode(items)

    def decode_twice(latents: torch.Tensor, height: int, width: int) -> list:
        decode(latents, height, width)
        return decode(latents, height, width)

    def three_forwards(transformer, arguments, keywords) -> None:
        if not torch.is_grad_enabled():
            return
        images = len(keywords["hidden_states"])
        encode_texts([prompts[i % len(prompts)] for i in range(3 * images)])
        enabled = policy.dtype != torch.float32
        # without its cache: autocast would reuse the weights cast here, which have no gradient
        with torch.no_grad(), torch.autocast(policy.device.type, policy.dtype, enabled, cache_enabled=False):
            transformer(*arguments, **keywords)
            with reference(policy):
                transformer(*arguments, **keywords)

    policy.encode, policy.decode = encode_each_image, decode_twice
    policy.transformer.register_forward_pre_hook(three_forwards, with_kwargs=True)
