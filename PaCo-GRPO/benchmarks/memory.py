"""Peak memory of a configuration, computed from tensor sizes without a GPU, phase by phase.

    python benchmarks/memory.py --config config/grpo.py:t2is
    python benchmarks/memory.py --config config/grpo.py:t2is_24gb --config.train.batch_size=2 --processes 8
    python benchmarks/memory.py --config config/grpo.py:t2is_48gb --measure        # on a GPU: random weights, real bytes

The policy's own code runs on torch's meta device, where tensors have sizes and no memory. Every tensor is followed until
it dies, through autograd's saved tensors, gradient checkpointing and the backward pass. The computed numbers leave out
what no tensor holds (CUDA context, cuBLAS workspaces, fragmentation: RESERVE below) and what other programs use.
--measure also runs the phases on a GPU and prints its allocator's peak next to the computed number.

The real architectures are known without a download (FLUX.1-dev, FLUX.1-Kontext-dev, Qwen-Image-Edit); any local pipeline
folder works too. Writes benchmarks/results/memory/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
# Not held by any tensor: CUDA context and libraries, cuBLAS and cuDNN workspaces, fragmentation of the allocator.
RESERVE = 1.5 * GIB
CARDS = (80, 48, 24)  # GB as sold; 80 GB show as 79.2 GiB (H100), 48 as 47.4 (L40S), 24 as 23.6 (4090)
USABLE = {80: 79.2, 48: 44.4, 24: 22.0}  # GiB, the smallest of the cards sold as such, ECC on


def compute(options: Any, processes: int = 1) -> dict[str, Any]:
    """Bytes by part and by phase of one process of ``options``.

    Returns:
        ``parts``: what stays on the accelerator, by name. ``phases``: what each phase adds to it, and the sum.
        ``saved``: what autograd keeps between forward and backward. ``parameters``: counts by part.
    """
    from measuring import footprint as fp
    from paco_grpo.objectives import get_objective
    from paco_grpo.training.plan import make_plan

    for name, value in (
        ("sample.batch_size", options.sample.batch_size),
        ("max_sequence_length", options.max_sequence_length),
    ):
        if not value:
            raise RuntimeError(f"config.{name}=0 is chosen by a run from its GPU or data set: give a number here")
    policy = fp.meta_policy(options)
    plan = make_plan(options, processes, get_objective(options.train.loss_type).gradient_steps)
    sampled = fp.shape(policy, options, options.train.resolution, plan.sample_batch_size)
    trained = fp.shape(policy, options, options.train.resolution, options.train.batch_size)
    tested = fp.shape(policy, options, options.test.resolution, options.test.batch_size)
    parts = fp.resident(policy, options)
    held = sum(parts.values())
    records = fp.record_bytes(policy, options, sampled, plan.samples_per_process, plan.prompts)
    decoder = fp.bytes_of(policy.pipeline.vae) if options.speed.offload_vae else 0
    encoders = 0 if options.speed.offload_text_encoders is False else sum(map(fp.bytes_of, policy.text_encoders()))
    merged = fp.merged_bytes(policy) if options.sample.merge_lora else 0
    tokens = fp.tokens(policy, trained)
    training = fp.training(policy, options, trained)
    adds = {
        "encode": encoders + (fp.encoding(policy, sampled) or 0),
        "sample": records
        + merged
        + fp.tail_bytes(policy, options)
        + fp.sampling(policy, sampled)
        + fp.decoded_bytes(policy, options, fp.tokens(policy, sampled)),
        "decode": records + decoder + fp.decoding(policy, sampled),
        "train": records + training["peak"] + fp.decoded_bytes(policy, options, tokens),
        # several processes sum gradients in one message
        "update": records + training["gradients"] * (2 if processes > 1 else 1),
        "sample test": fp.sampling(policy, tested) + fp.decoded_bytes(policy, options, fp.tokens(policy, tested)),
        "decode test": decoder + fp.decoding(policy, tested),
    }
    if options.speed.overlap_decode is not False:  # None: where the device is CUDA
        adds["sample, decode"] = adds.pop("sample") + adds.pop("decode") - records
    return {
        "model": options.pretrained.model,
        "parameters": fp.parameters(policy),
        "parts": parts,
        "resident": held,
        "records": records,
        "saved": training["saved"],
        "phases": {name: {"adds": added, "total": held + added} for name, added in adds.items()},
        "peak": held + max(adds.values()),
    }


def measure(options: Any) -> dict[str, int]:
    """Peak of the GPU's allocator in the same phases, with random weights.

    Raises:
        RuntimeError: There is no CUDA device.
    """
    import torch

    from measuring import footprint as fp

    if not torch.cuda.is_available():
        raise RuntimeError("--measure needs a CUDA device; without it the numbers are computed")
    device = torch.device("cuda")
    policy = fp.random_policy(options, device)
    sampled, trained = (
        fp.shape(policy, options, options.train.resolution, batch)
        for batch in (options.sample.batch_size, options.train.batch_size)
    )
    tested = fp.shape(policy, options, options.test.resolution, options.test.batch_size)
    actions = {
        "sample": lambda: fp.sampling(policy, sampled),
        "decode": lambda: fp.decoding(policy, sampled),
        "train": lambda: fp.training(policy, options, trained),
        "sample test": lambda: fp.sampling(policy, tested),
        "decode test": lambda: fp.decoding(policy, tested),
    }
    found = {"resident": torch.cuda.memory_allocated(device)}
    for name, action in actions.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        found[name] = torch.cuda.max_memory_allocated(device) - before
    return found


def fits(found: Mapping[str, Any]) -> dict[int, float]:
    """GiB left on each card after RESERVE; negative: it does not fit."""
    return {card: USABLE[card] - (found["peak"] + RESERVE) / GIB for card in CARDS}


def tables(name: str, found: Mapping[str, Any], measured: Mapping[str, int] | None = None) -> str:
    """Markdown: parts, phases, and the cards that fit."""
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in found["parts"].items())
    lines = [
        f"**{name}** ({found['model']}), GiB, computed" + (" | measured" if measured else ""),
        "",
        f"Resident, {found['resident'] / GIB:.2f}: {parts}. Kept for the backward pass: {found['saved'] / GIB:.2f}.",
        "",
        "| phase | adds | total |" + (" adds, measured |" if measured else ""),
        "|---|--:|--:|" + ("--:|" if measured else ""),
    ]
    for phase, row in found["phases"].items():
        line = f"| {phase} | {row['adds'] / GIB:.2f} | {row['total'] / GIB:.2f} |"
        if measured:
            line += f" {measured[phase] / GIB:.2f} |" if phase in measured else " – |"
        lines.append(line)
    verdicts = [
        f"{card} GB: " + (f"fits, {left:.1f} GiB left" if left >= 0 else f"{-left:.1f} GiB too much")
        for card, left in fits(found).items()
    ]
    return "\n".join([*lines, "", f"With {RESERVE / GIB:.1f} GiB for CUDA itself: {'; '.join(verdicts)}.", ""])


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after an error message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--processes", type=int, default=1, help="GPUs that share an epoch's images")
    parser.add_argument("--measure", action="store_true", help="also run the phases on this machine's GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory", help="folder")
    arguments, rest = parser.parse_known_args(given)
    from measuring.report import header, write
    from paco_grpo.options import ConfigError, read_options
    from paco_grpo.rehearsal.models import UnknownModelError

    try:
        options, name = read_options(rest)
        found = compute(options, arguments.processes)
        measured = measure(options) if arguments.measure else None
    except (ConfigError, UnknownModelError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {"config": name, "overrides": rest[1:], "processes": arguments.processes}
    text = tables(name, found, measured)
    made = header("memory", settings) | found | {"kind": "computed", "measured": measured}
    write(arguments.output / f"{name}.json", made, text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
