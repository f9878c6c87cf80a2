"""Does this machine's GPU compute what the CPU computes, how fast, and in how much memory?

It takes ten to fifteen minutes and downloads nothing.

    python benchmarks/check_gpu.py   # run it first on a new machine

Checks run one after the other until the minutes are over, and a failure does not end the rest:
epochs of the toy model and gradients of every family at full width, against the CPU's; epochs at
full size with random weights, beside the memory that estimate.py predicts for the same
run. Without a GPU, the first two run on the CPU alone.

Exit status: 0 = nothing failed, 1 = something did, 2 = a wrong option.
"""

import argparse
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import epoch
from paco_judge.files import write_json

CONFIG = f"--config={ROOT}/config/grpo.py:"
# One model of each family; editors have the transformers of these.
FAMILIES = (
    "black-forest-labs/FLUX.1-dev",
    "Qwen/Qwen-Image",
    "stabilityai/stable-diffusion-3.5-medium",
    "Tongyi-MAI/Z-Image",
    "black-forest-labs/FLUX.2-klein-base-4B",
)
# Largest distance from the CPU's float32, as a share. Disturbing every velocity by 1e-4 of its size
# moves an epoch's update by 3e-5. The CPU's own bfloat16 moves gradients of FLUX.1-dev by 0.53.
FLOAT32_LIMIT = 0.01
BF16_LIMIT = 0.7
# A mean first ratio is trusted up to a quarter of the clip range.
RATIO_LIMIT = 2.5e-5
# Configurations at full size, and the seconds of each: a cold compilation takes minutes.
FULL_SIZE = {"t2is": 150, "t2is_80gb": 400, "t2is_qwen": 300, "z_image_t2is": 150, "sd3_t2is": 150}
BF16 = {"mixed_precision": "bf16"}
LESS_MEMORY = BF16 | {"speed.offload_vae": True, "enable_gradient_checkpointing": True}
# Checks of the toy model on a GPU; nf4 is another model, so its update is bounded only roughly.
VARIANTS: dict[str, tuple[float, float, dict[str, Any]]] = {  # seconds, limit, options
    "bf16": (30, BF16_LIMIT, BF16),
    "less memory": (30, BF16_LIMIT, LESS_MEMORY),
    "nf4": (30, 1.0, BF16 | {"pretrained.quantize": "nf4"}),
    "compiled": (240, BF16_LIMIT, BF16 | {"speed.compile": True}),
}
Check = tuple[str, float, Callable[[], dict[str, Any]]]  # name, seconds at most, its figures


class Deviates(Exception):
    """A check ran, and its numbers are not those that they should be."""


def gradients(model: str, device: str, dtype: str) -> Any:
    """Gradients of a LoRA with two blocks of each kind at full width, flat, on the CPU."""
    import torch

    from paco_grpo import architectures
    from paco_grpo.policies import PolicySettings
    from paco_grpo.policies.adapters import add_lora
    from paco_grpo.policies.diffusers_policy import TextConditioning
    from paco_grpo.policies.loading import policy_of
    from paco_grpo.policies.reference_image import ReferenceConditioning

    settings = PolicySettings(device="meta", dtype=getattr(torch, dtype))
    # A GPU draws a billion weights at once, a CPU takes half a minute.
    drawn_on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with architectures.with_blocks(model, 2):
        pipeline = architectures.pipeline_of(model, settings.dtype)
        transformer = architectures.module_of(model, "transformer", torch.float32, drawn_on)
    policy = policy_of(type(pipeline))(pipeline, settings)
    policy.transformer = transformer.requires_grad_(False).eval()
    pipeline.register_modules(transformer=transformer)
    policy.device = torch.device(drawn_on)  # its other parts stay without weights
    add_lora(policy)
    architectures.fill_randomly(transformer)
    for parameter in transformer.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(settings.dtype)
    transformer.to(device)
    policy.device = torch.device(device)
    config = transformer.config
    width = config.get("joint_attention_dim") or config.cap_feat_dim
    features = {"prompt_embeds": torch.randn(2, 48, width).to(device, settings.dtype)}
    if config.get("pooled_projection_dim"):
        pooled = torch.randn(2, config.pooled_projection_dim)
        features["prompt_pooled"] = pooled.to(device, settings.dtype)
    if policy.edits_images:
        no_references = policy._encode_references([(), ()])
        conditioning = ReferenceConditioning(**features, **no_references)
    else:
        conditioning = TextConditioning(**features)
    side = 8 * policy.size_multiple
    latents = policy.initial_latents([0, 1], side, side)
    sigma = torch.tensor([0.4, 0.7], device=device)
    velocity = policy.velocity(latents, sigma, conditioning, side, side, guided=False)
    velocity.square().mean().backward()
    # A last block's text goes nowhere, so its layers may have no gradient.
    return flat(p.grad for p in transformer.parameters() if p.grad is not None)


def toy_update(folder: Path, device: str, changes: dict[str, Any]) -> Any:
    """How an epoch moves the adapter of the quickstart's FLUX, flat, on the CPU."""
    from accelerate.state import AcceleratorState

    from paco_grpo.training.build import build_run
    from paco_grpo.training.trainer import Trainer

    # Accelerate looks for devices once per process; here it looks again.
    os.environ["ACCELERATE_USE_CPU"] = str(device == "cpu").lower()
    AcceleratorState._reset_state(reset_partial_state=True)
    # With a tiny epsilon, Adam's first step is the gradient's sign, and rounding near 0 shows.
    options = {
        "dataset": ROOT / "dataset" / "T2IS",
        "save_dir": folder,
        "pretrained.model": ROOT.parent / "quickstart" / "models" / "flux",
        "sample.num_images_per_prompt": 4,
        "sample.unique_sample_num_per_epoch": 4,
        "train.adam_epsilon": 1e-2,
        "train.learning_rate": 1e-2,
        "allow_tf32": False,
    }
    run = build_run(epoch.read([CONFIG + "toy_t2is"], options | changes))
    parameters = run.state.parameters.values()
    before = flat(parameters)
    Trainer(run).epoch()
    run.close()
    return flat(parameters) - before


def flat(tensors: Any) -> Any:
    """A float32 copy on the CPU."""
    import torch

    return torch.cat([tensor.detach().float().flatten().cpu() for tensor in tensors])


def compared(values: Any, reference: Any, limit: float) -> dict[str, float]:
    """The distance of ``values`` from ``reference``. Raises Deviates: It is over ``limit``."""
    share = float((values - reference).norm() / reference.norm())
    if not share <= limit or not values.any():
        raise Deviates(f"they differ by {share:.3g} of the CPU's, over {limit}")
    return {"deviation": share}


def full_size(name: str) -> dict[str, Any]:
    """Speed, memory and the first ratio of a small epoch, and the estimate of the same run."""
    import torch

    from paco_grpo.estimate.generator import estimate

    changes = {
        "sample.unique_sample_num_per_epoch": 2,
        "sample.num_images_per_prompt": 8,
        "train.gradient_step_per_epoch": 1,  # so that all ratios are first ratios
    }
    options = epoch.read([CONFIG + name], changes)
    torch.cuda.reset_peak_memory_stats()
    figures = epoch.measure(options, 1, True)
    estimated = estimate(options, name, 1, torch.cuda.get_device_properties(0).total_memory)
    peak = max(estimated.peaks[phase] for phase in ("encode", "sample", "train", "update"))
    row = {
        "images_per_s": figures["images_per_second"],
        "sample_s": figures["time/sample_s"],
        "train_s": figures["time/train_s"],
        "peak_gib": figures["memory/peak_cuda_mb"] / 1024,
        "estimated_gib": peak / 2**30,
        "first_ratio": figures["train/ratio_deviation"],
    }
    if not row["first_ratio"] <= RATIO_LIMIT:
        raise Deviates(f"the first ratio is off by more than {RATIO_LIMIT}: {row}")
    return row


def two_gpus(sharding: str) -> dict[str, Any]:
    """benchmarks/epoch.py on the quickstart's FLUX, under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    config = [CONFIG + "toy_t2is", f"--config.dataset={ROOT}/dataset/T2IS"]
    config += [f"--config.train.sharding={sharding}", "--repeats", "1"]
    command = [sys.executable, *launcher, epoch.__file__, *config]
    environment = os.environ | {"ACCELERATE_USE_CPU": "false"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return {"images_per_s": json.loads(done.stdout.splitlines()[-1])["images_per_second"]}


def plan(folder: Path, gpus: int) -> list[Check]:
    """All checks of this machine, the most important first."""
    device = "cuda" if gpus else "cpu"
    reference = functools.cache(lambda: toy_update(folder, "cpu", {}))
    exact_gradients = functools.cache(lambda model: gradients(model, "cpu", "float32"))

    def toy(limit: float, changes: dict[str, Any]) -> dict[str, float]:
        return compared(toy_update(folder, device, changes), reference(), limit)

    def family(model: str, dtype: str, limit: float) -> dict[str, float]:
        return compared(gradients(model, device, dtype), exact_gradients(model), limit)

    checks: list[Check] = [("toy, float32", 60, lambda: toy(FLOAT32_LIMIT, {}))]
    variants = VARIANTS if gpus else {}
    for name, (seconds, limit, changes) in variants.items():
        checks.append((f"toy, {name}", seconds, functools.partial(toy, limit, changes)))
    for model in FAMILIES:
        for dtype, limit in (("float32", FLOAT32_LIMIT), ("bfloat16", BF16_LIMIT)):
            check = functools.partial(family, model, dtype, limit)
            checks.append((f"{model.split('/')[1]}, {dtype}", 60, check))
    if not gpus:
        return checks
    for name, seconds in FULL_SIZE.items():
        checks.append((name, seconds, functools.partial(full_size, name)))
    if gpus > 1:
        for sharding in ("None", "fsdp2"):
            check = functools.partial(two_gpus, sharding)
            checks.append((f"two GPUs, sharding={sharding}", 160, check))
    return checks


def run_check(check: Check, deadline: float) -> dict[str, Any]:
    """A row of the table."""
    name, seconds, function = check
    started = time.monotonic()
    limit = int(min(seconds, deadline - started))
    row: dict[str, Any] = {"status": "skipped", "seconds": 0.0, "name": name}
    if limit < 10:
        return row

    def end(*_: Any) -> None:
        raise TimeoutError(f"not finished in {limit} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(limit)
    try:
        row |= function()
        row["status"] = "passed"
    except Exception as error:  # noqa: BLE001 - the next check may still tell something
        traceback.print_exc()
        text = " ".join(str(error).split())
        row |= {"status": "failed", "message": f"{type(error).__name__}: {text[:300]}"}
    finally:
        signal.alarm(0)
    row["seconds"] = time.monotonic() - started
    gc.collect()
    return row


def line(row: dict[str, Any]) -> str:
    """``row`` on the screen."""
    figures = []
    for name, value in list(row.items())[3:]:
        figures.append(value if isinstance(value, str) else f"{name} {value:.3g}")
    head = f"{row['status']:<8}{row['seconds']:6.1f} s  {row['name']:<40}"
    return head + ", ".join(figures)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=15, help="begin and end within them")
    parser.add_argument("--only", default="", help="checks whose name contains this text")
    output = Path("benchmarks/results/check_gpu.json")
    parser.add_argument("--output", type=Path, default=output)
    arguments = parser.parse_args(words)
    deadline = time.monotonic() + 60 * arguments.minutes
    import torch
    import torch._dynamo  # an import that a time limit ends would break those after it

    import paco_grpo.estimate.generator
    import paco_grpo.training.trainer  # noqa: F401

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    machine = {"gpus": gpus, "torch": torch.__version__, "cores": os.cpu_count()}
    print(json.dumps(machine), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for check in plan(Path(folder), len(gpus)):
            if arguments.only in check[0]:
                rows.append(run_check(check, deadline))
                print(line(rows[-1]), flush=True)
    write_json(arguments.output, {"machine": machine, "results": rows})
    print("\n".join(map(line, rows)))
    print(arguments.output)
    return 1 if "failed" in [row["status"] for row in rows] else 0


if __name__ == "__main__":
    sys.exit(main())
