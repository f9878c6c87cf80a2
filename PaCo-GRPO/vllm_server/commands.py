"""Command lines and environments of the processes that a launch starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_server.engines import Engine
from vllm_server.models import text_config
from vllm_server.plan import LaunchPlan, ServerPlan
from vllm_server.settings import LaunchSettings

# Ours, not the engine's: vLLM reads VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not know.
_OUR_VARIABLES = (
    *("VLLM_MODEL_PATHS", "VLLM_MODEL_NAMES", "VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_ENGINE", "VLLM_PYTHON"),
    *("VLLM_EXTRA_ARGS", "VLLM_START_TIMEOUT", "VLLM_TP", "VLLM_REPLICAS", "VLLM_LORA", "VLLM_GATEWAY"),
    *("VLLM_GATEWAY_WORKERS", "VLLM_MAX_CONCURRENT", "VLLM_MAX_BODY_MB", "VLLM_REQUEST_TIMEOUT"),
)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_KEEP_ALIVE_S = "75"  # longer than clients keep their idle connections: the server must not be the first to close


def server_command(engine: Engine, settings: LaunchSettings, server: ServerPlan) -> list[str]:
    """An engine's command line."""
    text = text_config(server.config)
    longest = min(settings.max_model_len, int(text.get("max_position_embeddings", settings.max_model_len)))
    common = ["--model", server.model.path, "--served-model-name", server.model.name]
    common += ["--host", server.host, "--port", str(server.port), "--max-model-len", str(longest)]
    if engine.name == "transformers":
        loras = ["--lora", *(f"{adapter.name}={adapter.path}" for adapter in server.adapters)] if server.adapters else []
        return [engine.python, "-m", "vllm_server.transformers_engine", *common, *loras, *settings.extra_args]
    vllm = [engine.python, "-m", "vllm.entrypoints.openai.api_server", *common]
    vllm += ["--limit-mm-per-prompt", '{"image": 2, "video": 0}']
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not touch them.
    vllm += ["--generation-config", "vllm"]
    if server.adapters:
        rank = next((rank for rank in _LORA_RANKS if rank >= server.lora_rank), server.lora_rank)
        vllm += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(server.adapters))]
        vllm += ["--lora-modules", *(f"{adapter.name}={adapter.path}" for adapter in server.adapters)]
    if server.gpus:
        vllm += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        vllm += ["--tensor-parallel-size", str(len(server.gpus) // server.data_parallel)]
        if server.data_parallel > 1:
            vllm += ["--data-parallel-size", str(server.data_parallel)]
    else:
        # bfloat16 is emulated on most CPUs; compiling a graph takes longer there than it saves.
        vllm += ["--dtype", "float32", "--enforce-eager"]
    return [*vllm, *settings.extra_args]


def server_environment(engine: Engine, server: ServerPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """An engine's environment: ours without the launch variables; its own GPUs; few threads on small machines."""
    child = _without_ours(environment)
    if server.gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(server.gpus)
    if engine.name == "transformers":
        child["PYTHONPATH"] = _our_path(environment)
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    else:
        child.pop("PYTHONPATH", None)  # packages of the training environment do not belong in vLLM's
        child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _KEEP_ALIVE_S)
        if not server.gpus:
            child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with the training
    return child


def gateway_command(settings: LaunchSettings, plan: LaunchPlan) -> list[str]:
    """The gateway's command line. The API key is not on it: command lines can be read by everybody."""
    limits = settings.gateway
    words = [sys.executable, "-m", "vllm_server.gateway_fastapi", "--host", settings.host, "--port", str(settings.port)]
    words += ["--workers", str(limits.workers), "--max-concurrent", str(limits.max_concurrent)]
    words += ["--max-body-mb", str(limits.max_body_mb), "--request-timeout", str(limits.request_timeout_s)]
    for server in plan.servers:
        words += [word for name in server.names for word in ("--upstream", f"{name}=http://{server.host}:{server.port}")]
    return words


def gateway_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The gateway's environment."""
    return _without_ours(environment) | {"PYTHONPATH": _our_path(environment)}


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    return child | {"PYTHONUNBUFFERED": "1"}


def _our_path(environment: Mapping[str, str]) -> str:
    package = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
