"""What the tests of the engines look at inside the processes of a run, and a prompt set that makes their work uneven."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from survival import rows
from tiny_run import brightness
from torch.distributed.tensor import DTensor

# Adam's epsilon is large, because with a tiny one the first step is the sign of the gradient, and rounding of gradients
# near 0 then shows at full size. Weights move by about 1e-4 a step here; they must agree to 1e-6.
COMMON = {
    "num_epochs": 2, "save_freq": 2, "train__adam_epsilon": 1e-2, "train__learning_rate": 1e-2,
    "train__gradient_step_per_epoch": 2, "sample__num_images_per_prompt": 8, "test__num_images": 5,
    "train__max_missing_reward_fraction": 1, "train__reward_fn": "{'engines:gapped': 1}",
}  # fmt: skip
TOLERANCE = 1e-6


def write_uneven_prompts(folder: Path) -> Path:
    """Items of two shapes, so that processes differ in their number of batches, and of one of which no image has a
    score (see ``gapped``)."""
    folder.mkdir(parents=True)
    for split, count in (("train", 5), ("test", 3)):
        rows = [
            {"prompt": f"{i}{split} 1x2 grid. [LEFT]: a. [RIGHT]: b.", "height": 16, "width": 64 if i % 3 else 16}
            for i in range(count)
        ]
        (folder / f"{split}_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def gapped(folder: str, without: str = ""):
    """brightness, NaN for prompts that begin with ``without``; what each process asks for is counted in ``folder``."""
    score = brightness()

    def count_then_score(images, items):
        with (Path(folder) / f"asked_{os.environ.get('RANK', '0')}").open("a") as out:
            out.write(f"{len(images)}\n")
        scores = score(images, items)
        if without:
            scores[[item.prompt.startswith(without) for item in items]] = np.nan
        return scores

    return count_then_score


def watch(trainer, folder: Path) -> None:
    """Write down how much of the transformer this process holds, and the advantages of every epoch."""
    updater, rank = trainer.run.updater, trainer.accelerator.process_index
    named = list(trainer.state.policy.transformer.named_parameters())
    base = [p for name, p in named if "lora_" not in name]
    seen = {
        "engine": trainer.run.state.strategy.name,
        "base": sum(p.numel() for p in base),
        "base_here": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in base),
        "sharded": sorted({isinstance(p, DTensor) for p in base}),
        "lora_whole": not any(isinstance(p, DTensor) for name, p in named if "lora_" in name),
        "dtypes": sorted({str(p.dtype) for p in base}),
        "optimizer_here": 0,
        "advantages": [],
    }
    original = updater.run

    def run(rollouts, item_ids, advantages, kept, epoch):
        seen["advantages"].append(np.where(kept, advantages, 0).tolist())
        result = original(rollouts, item_ids, advantages, kept, epoch)
        optimizer = getattr(updater.state.optimizer, "optimizer", updater.state.optimizer)  # DeepSpeed's holds another
        moments = [entry["exp_avg"] for entry in optimizer.state.values()]
        seen["optimizer_here"] = sum((m.to_local() if isinstance(m, DTensor) else m).numel() for m in moments)
        (folder / f"seen_{rank}.json").write_text(json.dumps(seen))
        return result

    updater.run = run


def seen(folder: Path, rank: int = 0) -> dict:
    """What ``watch`` wrote."""
    return json.loads((folder / f"seen_{rank}.json").read_text())


def asked(folder: Path, rank: int) -> int:
    """Images for which a process asked ``gapped``, in the whole run."""
    return sum(int(line) for line in (folder / f"asked_{rank}").read_text().splitlines())


def tensors(folder, name="trainable", epoch=2) -> dict[str, torch.Tensor]:
    """Of a checkpoint."""
    return load_file(folder / "runs" / "run" / "checkpoints" / f"epoch_{epoch:04d}" / "state" / f"{name}.safetensors")


def assert_same_training(one, other, tolerance=TOLERANCE):
    """Advantages, numbers of every epoch and evaluation, weights."""
    # rounding may turn a pixel of an 8-bit image, and with it an advantage in the third decimal
    np.testing.assert_allclose(seen(one)["advantages"], seen(other)["advantages"], rtol=0, atol=5e-3)
    first, second = rows(one), rows(other)
    assert [(row["phase"], row["epoch"], row["step"]) for row in first] == [
        (row["phase"], row["epoch"], row["step"]) for row in second
    ]
    for a, b in zip(first, second, strict=True):
        for key, value in a.items():
            if key.startswith(("reward/", "advantage/", "train/loss", "train/grad", "eval/", "health/")):
                assert b[key] == pytest.approx(value, rel=2e-3, abs=1e-6), key
    assert_same_weights(one, other, tolerance)


def assert_same_weights(one, other, tolerance=TOLERANCE):
    """Also the averaged ones; after the second epoch."""
    for name in ("trainable", "ema"):
        a, b = tensors(one, name), tensors(other, name)
        assert a.keys() == b.keys()
        for key, value in a.items():
            torch.testing.assert_close(b[key], value, rtol=0, atol=tolerance)


def moved(folder) -> float:
    """Largest distance of a weight from its average: the run did train."""
    pairs = zip(tensors(folder).values(), tensors(folder, "ema").values(), strict=True)
    return max(float((weight - average).abs().max()) for weight, average in pairs)


def on_deepspeed(stage: int) -> None:
    """accelerate finds itself started with deepspeed_zero1.yaml or deepspeed_zero2.yaml, on a CPU."""
    os.environ |= {
        "ACCELERATE_USE_CPU": "false", "ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    }  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone: the other wants compiling
