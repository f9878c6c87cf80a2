"""Which GPUs there are and how they are divided: pure functions, except the one question to nvidia-smi."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from vllm_server.settings import LaunchError


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; all by default, none where it is empty.

    Raises LaunchError for one that nvidia-smi does not list.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if listed is None else [part.strip() for part in listed.split(",") if part.strip()]
    if wanted == [] or (wanted and wanted[0] == "-1"):
        return ()
    return choose_gpus(wanted, _nvidia_smi())


def choose_gpus(wanted: Sequence[str] | None, listing: str) -> tuple[str, ...]:
    """``wanted`` (indices, or beginnings of GPU- and MIG- identities; None: all) out of what ``nvidia-smi -L`` says."""
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    identities = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listing)
    if wanted is None:
        return tuple(str(index) for index in range(count))
    for gpu in wanted:
        there = int(gpu) < count if gpu.isdigit() else any(identity.startswith(gpu) for identity in identities)
        if not there or not (gpu.isdigit() or gpu.startswith(("GPU-", "MIG-"))):
            here = f"GPUs 0 to {count - 1}" if count else "no GPU"
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={','.join(wanted)}: there is no GPU {gpu} here (nvidia-smi lists {here}). "
                "Correct it; empty serves on the CPU"
            )
    if len(set(wanted)) != len(wanted):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES={','.join(wanted)} names a GPU twice")
    return tuple(wanted)


def tensor_parallel_size(gpus: int, text_config: Mapping) -> int:
    """The largest power of two of the GPUs that divides the attention heads and agrees with the key/value heads.

    Agreeing: key/value heads are divided evenly or each is copied evenly. Qwen2.5-VL-7B (28 and 4 heads): at most 4.
    """
    size = 1
    while 2 * size <= gpus and fits_heads(2 * size, text_config):
        size *= 2
    return size


def fits_heads(size: int, text_config: Mapping) -> bool:
    """Whether a model's heads can be divided over ``size`` GPUs."""
    heads = int(text_config.get("num_attention_heads", 1))
    shared = int(text_config.get("num_key_value_heads", heads))
    return heads % size == 0 and (shared % size == 0 or size % shared == 0)


def divide_gpus(
    gpus: Sequence[str],
    names: Sequence[str],
    text_configs: Sequence[Mapping],
    tensor_parallel: Sequence[int | None],
    replicas: Sequence[int],
) -> list[list[tuple[str, ...]]]:
    """For each model, for each of its replicas, its GPUs; as many as its tensor parallelism.

    Where every model's parallelism is given, each gets what it needs; otherwise all get an equal share, and a
    parallelism that is not given is the largest that fits the share. Raises LaunchError naming model and variable.
    """
    if len(gpus) < len(names):
        raise LaunchError(
            f"{len(names)} models and {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: vLLM needs one for each. Serve "
            "fewer, or launch them one after another with a smaller GPU_MEMORY_UTILIZATION each"
        )
    needs = [size * copies if size else None for size, copies in zip(tensor_parallel, replicas, strict=True)]
    if all(needs):
        shares = needs
    else:
        shares = [len(gpus) // len(names) + (i < len(gpus) % len(names)) for i in range(len(names))]
    divided, first = [], 0
    for i, name in enumerate(names):
        size = tensor_parallel[i] or tensor_parallel_size(shares[i] // replicas[i], text_configs[i])
        if size * replicas[i] > min(shares[i], len(gpus) - first):
            raise LaunchError(
                f"{name}: VLLM_TP={size} x VLLM_REPLICAS={replicas[i]} needs {size * replicas[i]} GPUs, and there are "
                f"{min(shares[i], len(gpus) - first)} for it (of {len(gpus)} for {len(names)} models)"
            )
        if not fits_heads(size, text_configs[i]):
            raise LaunchError(f"{name}: its attention heads cannot be divided over VLLM_TP={size} GPUs; leave it unset")
        divided.append([tuple(gpus[first + r * size : first + (r + 1) * size]) for r in range(replicas[i])])
        first += shares[i]
    return divided


def _nvidia_smi() -> str:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""
