"""A whole run on tiny random weights in a second or two: options, prompt set, rewards."""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tiny_policies import FAMILIES, NAMES, picture

from paco_grpo.options import RunOptions, load_options
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.training.build import build_run
from paco_grpo.training.run import Run
from paco_grpo.training.sample import Rollouts
from paco_grpo.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]

# Everything that tests rely on is set here, because toy_t2is itself is tuned for the quickstart.
TINY = {
    "max_train_minutes": "None",
    "item_size": "aspect",
    "sample.num_steps": "3",
    "sample.noise_steps": "1",
    "sample.same_latent": "False",
    "sample.latents_per_prompt": "1",
    "sample.noise_level": "0.7",
    "sample.batch_size": "4",
    "sample.num_images_per_prompt": "4",
    "sample.unique_sample_num_per_epoch": "2",
    "train.resolution": "16",
    "train.batch_size": "3",
    "train.learning_rate": "1e-3",
    "train.gradient_step_per_epoch": "1",
    "train.lora_rank": "8",
    "train.lora_alpha": "16",
    "train.lora_targets": "default",
    "train.reward_fn": '{"tiny_run:brightness": 1.0}',
    "train.reward_fn_kwargs": "{}",
    "train.aggregate_fn": "None",
    "test.resolution": "32",
    "test.batch_size": "4",
    "test.num_steps": "2",
    "test.num_images": "5",
    "test.reward_fn": "",
    "num_epochs": "2",
    "save_freq": "1",
    "eval_freq": "0",
    "num_checkpoint_limit": "5",
    "logging_platform": "none",
    "max_sequence_length": "16",
    "run_name": "run",
}


def write_prompts(folder: Path, train: int = 4, test: int = 3, first_open: int = 0) -> Path:
    """A geneval prompt set of two-panel items; the ``first_open`` ones leave the subject open."""
    for split, count in (("train", train), ("test", test)):
        rows = [
            {
                "prompt": f"{i}{split} 1x2 grid. [LEFT]: a{i}. [RIGHT]: b{i}.",
                "idx": f"{i:03d}",
                "category": ["even", "odd"][i % 2],
                "open": i < first_open,
            }
            for i in range(count)
        ]
        write_rows(folder, split, rows)
    return folder


def write_edits(folder: Path, references: int = 1) -> Path:
    """A geneval_image prompt set; the pictures have two shapes.

    Several to a row: the first's picture is the last.
    """
    for split, count in (("train", 4), ("test", 3)):
        files = [f"{split}{i}.png" for i in range(count)]
        rows = []
        for i in range(count):
            images = [files[(i + k) % count] for k in reversed(range(references))]
            rows.append({"prompt": f"{i}{split} make it red", "images": images})
        write_rows(folder, split, rows)
        for i, file in enumerate(files):
            picture(i, 32, 64 if i % 2 else 32).save(folder / file)
    return folder


def write_rows(folder: Path, split: str, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / f"{split}_metadata.jsonl").write_text("".join(lines))


# Undoes the differences between the toy editors and toy_t2is, so that tests run the same on all
# three.
LIKE_T2IS = {
    "train.loss_type": "ppo",
    "train.timesteps": "None",
    "train.adv_clip_max": "5.0",
    "sample.noise_level": "0.7",
    "sample.same_latent": "True",
}


def overrides_for(model: Path, folder: Path, write=write_prompts, **changes: str) -> dict[str, str]:
    """Option → text; ``changes`` use ``__`` for dots."""
    if not (folder / "prompts").is_dir():
        write(folder / "prompts")
    places = {
        "pretrained.model": str(model),
        "dataset": str(folder / "prompts"),
        "save_dir": str(folder / "runs"),
    }
    if write is not write_prompts:
        places |= LIKE_T2IS
    return TINY | places | {key.replace("__", "."): str(value) for key, value in changes.items()}


def as_arguments(overrides: dict[str, str]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in overrides.items()]


def tiny_options(flux: Path, folder: Path, **changes: str) -> RunOptions:
    """toy_t2is, made tiny."""
    return load_options(
        f"{ROOT / 'config' / 'grpo.py'}:toy_t2is", overrides_for(flux, folder, **changes).items()
    )


def tiny_edit_options(model: Path, folder: Path, references: int = 1, **changes: str) -> RunOptions:
    """toy_kontext, made tiny."""
    overrides = overrides_for(model, folder, partial(write_edits, references=references), **changes)
    return load_options(f"{ROOT / 'config' / 'grpo.py'}:toy_kontext", overrides.items())


# An epoch of four images in two steps.
SMALL = {
    "sample__num_images_per_prompt": 2,
    "sample__batch_size": 4,
    "train__batch_size": 4,
    "sample__num_steps": 2,
    "num_epochs": 1,
    "save_freq": 0,
    "test__num_images": 1,
    "train__lora_rank": 2,
    "train__lora_alpha": 4,
    "max_sequence_length": 16,
    "train__reward_fn_kwargs": "{}",
    "train__reward_fn": '{"tiny_run:redness": 1.0, "jpeg_compressibility": 0.1}',
}


def family_options(name: str, model: Path, folder: Path, **changes: Any) -> RunOptions:
    """A small run of the family ``name`` in tiny_policies.py, with its guidance."""
    family = FAMILIES[name]
    guidance = {}
    for key, value in ({} if name in NAMES else family.options).items():
        group = "" if key in RunOptions.__dataclass_fields__ else "sample__"
        guidance[f"{group}{key}"] = value
    # A side of Qwen-Image-2.1 has 32 pixels at least.
    small = SMALL | ({"train__resolution": 32} if name == "qwen_image_21" else {})
    changes = small | guidance | changes
    if not family.references:
        return tiny_options(model, folder, **changes)
    return tiny_edit_options(model, folder, family.references, **changes)


def train(options: RunOptions) -> Trainer:
    trainer = Trainer(build_run(options))
    trainer.fit()
    return trainer


def sampled(run: Run) -> tuple[Rollouts, np.ndarray]:
    """Rollouts and scores of an epoch."""
    queue = ScoreQueue(run.rewards.train)
    rollouts = run.sampler.sample(queue.submit)
    return rollouts, queue.results(len(rollouts.positions))


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"paco_grpo_{name}", ROOT / "scripts" / f"{name}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows_of(options: RunOptions, phase: str | None = None) -> list[dict]:
    path = Path(options.save_dir) / options.run_name / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if phase in (None, row["phase"])]


# --- reward factories, named in configurations by import path
# ---------------------------------------------------------


def brightness(scale: float = 1.0):
    """Mean red minus mean blue: varies between images of random weights, needs nothing."""

    def score(images, items):
        arrays = [np.asarray(image, dtype=np.float64) / 255 for image in images]
        return np.array([scale * (a[..., 0].mean() - a[..., 2].mean()) * 100 for a in arrays])

    return score


def redness():
    def score(images, items):
        return np.array(
            [np.asarray(image, dtype=np.float64)[..., 0].mean() / 255 for image in images]
        )

    return score


class Worst:
    """An aggregation that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, a, b):
        self.calls += 1
        return {key: np.minimum(values, b[key]) for key, values in a.items()}


worst = Worst()
