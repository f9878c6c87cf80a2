"""Which GPUs there are, and how they are divided among models and replicas."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from vllm_server.settings import LaunchError


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them; all by default, none where it is empty.

    Raises:
        LaunchError: For a GPU that nvidia-smi does not list.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if listed is None else [part.strip() for part in listed.split(",") if part.strip()]
    if wanted == [] or (wanted and wanted[0] == "-1"):
        return ()
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        listing = found.stdout if found.returncode == 0 else ""
    except (FileNotFoundError, subprocess.TimeoutExpired):
        listing = ""
    return choose_gpus(wanted, listing)


def choose_gpus(wanted: Sequence[str] | None, listing: str) -> tuple[str, ...]:
    """Checks ``wanted`` (indices, or prefixes of GPU and MIG UUIDs; None: all) against the output of nvidia-smi -L."""
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    uuids = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listing)
    if wanted is None:
        return tuple(str(index) for index in range(count))
    for gpu in wanted:
        is_uuid = gpu.startswith(("GPU-", "MIG-")) and any(uuid.startswith(gpu) for uuid in uuids)
        if not (is_uuid or (gpu.isdigit() and int(gpu) < count)):
            here = f"GPUs 0 to {count - 1}" if count else "no GPU"
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={','.join(wanted)}: there is no GPU {gpu} here (nvidia-smi lists {here}). "
                "Correct it; empty serves on the CPU"
            )
    if len(set(wanted)) != len(wanted):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES={','.join(wanted)} names a GPU twice")
    return tuple(wanted)


def tensor_parallel_size(gpus: int, config: Mapping) -> int:
    """The largest power of two, at most ``gpus``, that fits the model's heads. Qwen2.5-VL-7B (28 and 4): at most 4."""
    size = 1
    while 2 * size <= gpus and fits_heads(2 * size, config):
        size *= 2
    return size


def smallest_parallel_size(
    gpus: int, config: Mapping, weight_bytes: int, memory_bytes: int, utilization: float
) -> int:
    """The fewest GPUs that hold a copy and leave two fifths of vLLM's share for keys, values and activations.

    One-token answers to short prompts are faster from many copies than from one that many GPUs share.
    """
    size, largest = 1, tensor_parallel_size(gpus, config)
    while size < largest and weight_bytes / size > 0.6 * utilization * memory_bytes:
        size *= 2
    return size


def smallest_memory(gpus: Sequence[str]) -> int | None:
    """Bytes of the smallest of ``gpus``; None where nvidia-smi does not say (MIG)."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={','.join(gpus)}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in found.splitlines()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def fits_heads(size: int, config: Mapping) -> bool:
    """Whether ``size`` GPUs can share the attention heads evenly, and share or copy the key/value heads evenly.

    True where ``config`` does not state them: vLLM decides.
    """
    heads = int(config.get("num_attention_heads", size))
    key_value_heads = int(config.get("num_key_value_heads", heads))
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def divide_gpus(
    gpus: Sequence[str],
    names: Sequence[str],
    configs: Sequence[Mapping],
    tensor_parallel: Sequence[int | None],
    replicas: Sequence[int],
) -> list[list[tuple[str, ...]]]:
    """For each model, for each of its replicas, its GPUs.

    If the tensor parallelism of every model is given, each gets what it needs. Otherwise all get an equal share, and a
    parallelism that is not given is the largest that fits the share.

    Raises:
        LaunchError: Naming model and variable.
    """
    if len(gpus) < len(names):
        raise LaunchError(
            f"{len(names)} models and {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: vLLM needs one for each. Serve "
            "fewer, or launch them one after another with a smaller GPU_MEMORY_UTILIZATION each"
        )
    shares = [size * copies if size else 0 for size, copies in zip(tensor_parallel, replicas, strict=True)]
    if not all(shares):
        shares = [len(gpus) // len(names) + (i < len(gpus) % len(names)) for i in range(len(names))]
    divided, first = [], 0
    for name, config, size, copies, share in zip(names, configs, tensor_parallel, replicas, shares, strict=True):
        size = size or tensor_parallel_size(share // copies, config)
        available = min(share, len(gpus) - first)
        if size * copies > available:
            raise LaunchError(
                f"{name}: VLLM_TP={size} x VLLM_REPLICAS={copies} needs {size * copies} GPUs, and there are "
                f"{available} for it (of {len(gpus)} for {len(names)} models)"
            )
        if not fits_heads(size, config):
            raise LaunchError(f"{name}: its attention heads cannot be divided over VLLM_TP={size} GPUs; leave it unset")
        divided.append([tuple(gpus[first + r * size : first + (r + 1) * size]) for r in range(copies)])
        first += share
    return divided
