"""Two processes on two GPUs, and the judge's server."""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_policies import build, picture
from tiny_run import as_arguments, overrides_for

from gpu_checks.steps import Deviates, Step

ROOT = Path(__file__).resolve().parents[2]
THEME = "a red square in four sizes"


def two_gpus(folder: Path, sharding: str) -> dict[str, Any]:
    """benchmarks/epoch.py on the tiny FLUX, under torchrun."""
    output = folder / f"two-{sharding}.json"
    model = folder / "two-flux"
    if not model.is_dir():
        build("flux", model)
    overrides = overrides_for(
        model, folder / "two", train__sharding=sharding, mixed_precision="bf16"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(ROOT / "benchmarks" / "epoch.py"), "--repeats", "1", "--output", str(output)]
    config = ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *as_arguments(overrides)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *script, *config]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=150, check=False, **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    report = json.loads(output.read_text())
    return {"processes": report["processes"], "epoch_s": report["medians"]["epoch_s"]}


def two_gpu_steps(folder: Path) -> list[Step]:
    """Replicated, and sharded with FSDP2."""
    return [
        Step("two GPUs, replicated", 160, partial(two_gpus, folder, "None")),
        Step("two GPUs, FSDP2", 160, partial(two_gpus, folder, "fsdp2")),
    ]


def ask_judge(url: str, model: str) -> dict[str, float]:
    """Pairs a second at 64 in flight, and P(Yes) of two pairs.

    Raises:
        Deviates: P(Yes) is not higher for an image and itself than for two different images.
    """
    import judge_load
    from paco_judge import Judge

    settings = {
        "model": model,
        "api_key": None,
        "rounds": 1,
        "concurrency": [64],
        "pairs": 256,
        "size": 512,
    }
    rounds = judge_load.run(argparse.Namespace(**settings), {"judge": url})
    (row,) = judge_load.summary(rounds)
    judge = Judge(url, model)
    first = picture(0, 256, 256)
    other = Image.new("RGB", (256, 256), "blue")
    same, different = judge.score([first, first], [first, other], theme=THEME)
    figures = {
        "pairs_per_s": row["pairs_per_second"],
        "p_yes_same": same,
        "p_yes_different": different,
    }
    if row["errors"] or same is None or different is None or not same > different:
        raise Deviates(f"{row['errors']} errors, {figures}")
    return figures
