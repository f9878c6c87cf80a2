"""What the tests of the engines look at inside the processes of a run, and a prompt set that makes their work uneven."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tiny_run import brightness
from torch.distributed.tensor import DTensor


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
    named = list(trainer.policy.transformer.named_parameters())
    base = [p for name, p in named if "lora_" not in name]
    seen = {
        "base": sum(p.numel() for p in base),
        "base_here": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in base),
        "divided": sorted({isinstance(p, DTensor) for p in base}),
        "lora_whole": not any(isinstance(p, DTensor) for name, p in named if "lora_" in name),
        "dtypes": sorted({str(p.dtype) for p in base}),
        "optimizer_here": 0,
        "advantages": [],
    }
    original = updater.run

    def run(rollouts, positions, advantages, kept, epoch):
        seen["advantages"].append(np.where(kept, advantages, 0).tolist())
        result = original(rollouts, positions, advantages, kept, epoch)
        moments = [entry["exp_avg"] for entry in updater.optimizer.state.values()]
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
