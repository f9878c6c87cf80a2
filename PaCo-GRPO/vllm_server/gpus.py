"""Which GPUs there are, and which model gets which of them."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_server.settings import LaunchError, LaunchSettings, Model, split_list


class Place(NamedTuple):
    """Where a model runs."""

    gpus: tuple[str, ...]  # empty: the CPU
    copies: int = 1  # of the model, on equal parts of the GPUs


def gpu_memory() -> list[int]:
    """Bytes of each GPU of this machine; 0: unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(mib) << 20 if mib.strip().isdigit() else 0 for mib in done.stdout.splitlines()]


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES, or all if it is not set.

    They are indices, or UUIDs of GPUs and MIG instances.

    Raises LaunchError: There is no such GPU.
    """
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return tuple(str(index) for index in range(len(gpu_memory())))
    gpus = split_list(variable)
    if not gpus or variable.startswith("-1"):
        return ()
    count = len(gpu_memory())
    for gpu in gpus:
        is_index = gpu.isdigit() and int(gpu) < count
        is_uuid = gpu.startswith(("GPU-", "MIG-")) and count > 0
        if not (is_index or is_uuid):
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES: there is no GPU {gpu} here (nvidia-smi lists {count}); "
                "leave it empty (CUDA_VISIBLE_DEVICES=) to serve on the CPU"
            )
    return tuple(gpus)


def fits_heads(size: int, config: Mapping) -> bool:
    """Whether ``size`` GPUs can share attention heads evenly; true if unknown.

    Key/value heads are shared, or copied, evenly too.
    """
    heads = int(config.get("num_attention_heads", size))
    key_value_heads = int(config.get("num_key_value_heads", heads))
    shares_keys = key_value_heads % size == 0 or size % key_value_heads == 0
    return heads % size == 0 and shares_keys


def parallel_size(gpus: int, config: Mapping, enough: float = float("inf")) -> int:
    """The first power of two that is ``enough``, or the largest possible one.

    ``gpus`` and the heads limit it. It is 1 if the heads are unknown.
    """
    size = 1
    if "num_attention_heads" not in config:
        return size
    while size < enough and 2 * size <= gpus and fits_heads(2 * size, config):
        size *= 2
    return size


def divide_gpus(
    settings: LaunchSettings, models: Sequence[Model], gpus: Sequence[str]
) -> list[Place]:
    """The place of each model. Raises LaunchError.

    If VLLM_TP is given, each model gets what it needs. Otherwise all get an equal share. Where
    neither VLLM_TP nor VLLM_REPLICAS is given, copies on as few GPUs as they fit fill the share:
    many copies answer one-token questions faster than one copy on many GPUs.
    """
    if len(gpus) < len(models):
        raise LaunchError(
            f"{len(models)} models on {len(gpus)} GPU: vLLM needs one for each; or launch them one "
            "after another with a smaller GPU_MEMORY_UTILIZATION each"
        )
    memory = _smallest_memory(gpus)
    places = []
    rest = list(gpus)
    for index, model in enumerate(models):
        if settings.tensor_parallel:
            share = settings.tensor_parallel * (settings.replicas or 1)
        else:
            share = len(gpus) // len(models)
            if index < len(gpus) % len(models):
                share += 1
        size, copies = _size_and_copies(settings, model, share, memory)
        assigned = tuple(rest[:share][: size * copies])
        if len(assigned) < size * copies:
            raise LaunchError(
                f"{model.name}: VLLM_TP={size} x VLLM_REPLICAS={copies} needs {size * copies} "
                f"GPUs, and there are {len(assigned)} for it (of {len(gpus)} for {len(models)} "
                "models)"
            )
        if not fits_heads(size, model.config):
            raise LaunchError(
                f"{model.name}: its attention heads cannot be divided over VLLM_TP={size} GPUs"
            )
        places.append(Place(assigned, copies))
        rest = rest[share:]
    return places


def _smallest_memory(gpus: Sequence[str]) -> int:
    """Bytes of the smallest of these GPUs; 0: unknown."""
    if any(gpu.startswith("MIG-") for gpu in gpus):
        return 0  # an instance has a part of its GPU's memory
    memory = gpu_memory()
    listed = [memory[int(gpu)] for gpu in gpus if gpu.isdigit()]
    return min(listed or memory, default=0)


def _size_and_copies(
    settings: LaunchSettings, model: Model, share: int, memory: int
) -> tuple[int, int]:
    """GPUs per copy, and copies, of a model on ``share`` GPUs of ``memory`` bytes each."""
    if settings.tensor_parallel:
        return settings.tensor_parallel, settings.replicas or 1
    if settings.replicas:
        return parallel_size(share // settings.replicas, model.config), settings.replicas
    if not (memory and model.weight_bytes):
        return parallel_size(share, model.config), 1
    # Two fifths of vLLM's share are left for keys, values and activations.
    room = 0.6 * settings.gpu_memory_utilization * memory
    size = parallel_size(share, model.config, enough=model.weight_bytes / room)
    return size, share // size
