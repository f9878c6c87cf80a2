"""Which engine serves, and with which command."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_server.settings import LaunchError, LaunchSettings, ServedModel

REPOSITORY = Path(__file__).resolve().parents[2]
# Ours, not the engine's: vLLM reads VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not know.
_OUR_VARIABLES = (
    *("VLLM_MODEL_PATHS", "VLLM_MODEL_NAMES", "VLLM_PORT", "VLLM_HOST", "VLLM_LABEL", "VLLM_ENGINE", "VLLM_PYTHON"),
    *("VLLM_EXTRA_ARGS", "VLLM_START_TIMEOUT", "VLLM_TP", "VLLM_REPLICAS", "VLLM_LORA"),
)


@dataclass(frozen=True)
class Engine:
    """The engine that was taken, and the interpreter that has it."""

    name: str
    python: str
    version: str


def choose_engine(settings: LaunchSettings, environment: Mapping[str, str]) -> Engine:
    """``auto`` takes vLLM where its environment is installed. Raises LaunchError when the one asked for is missing."""
    python = environment.get("VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    if settings.engine in ("auto", "vllm"):
        version = _version(python, "vllm")
        if version:
            return Engine("vllm", python, version)
        if settings.engine == "vllm" or environment.get("VLLM_PYTHON"):
            raise LaunchError(
                f"vLLM is not installed in {python}: run `bash setup.sh --vllm`, correct VLLM_PYTHON, or use "
                "VLLM_ENGINE=transformers"
            )
    missing = [name for name in ("transformers", "torch", "fastapi", "uvicorn") if not _version(sys.executable, name)]
    if missing:
        raise LaunchError(f"{sys.executable} lacks {', '.join(missing)}: run `bash setup.sh`, or set PYTHON")
    return Engine("transformers", sys.executable, _version(sys.executable, "transformers"))


def command(engine: Engine, settings: LaunchSettings, model: ServedModel, config: dict, gpus: int) -> list[str]:
    """The server's command line."""
    text = config.get("text_config") or config
    longest = min(settings.max_model_len, int(text.get("max_position_embeddings", settings.max_model_len)))
    common = ["--model", model.path, "--served-model-name", model.name]
    common += ["--host", settings.host, "--port", str(settings.port), "--max-model-len", str(longest)]
    if engine.name == "transformers":
        return [engine.python, "-m", "vllm_server.transformers_engine", *common, *settings.extra_args]
    vllm = [engine.python, "-m", "vllm.entrypoints.openai.api_server", *common]
    vllm += ["--limit-mm-per-prompt", '{"image": 2, "video": 0}']
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not touch them.
    vllm += ["--generation-config", "vllm"]
    if gpus:
        parallel = tensor_parallel_size(gpus, text)
        vllm += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        vllm += ["--tensor-parallel-size", str(parallel)]
    else:
        # bfloat16 is emulated on most CPUs; compiling a graph takes longer there than it saves.
        vllm += ["--dtype", "float32", "--enforce-eager"]
    return [*vllm, *settings.extra_args]


def child_environment(engine: Engine, environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """The server's environment: ours without the launch variables; few threads on small machines."""
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    child["PYTHONUNBUFFERED"] = "1"
    if engine.name == "transformers":
        package = str(Path(__file__).resolve().parents[1])
        child["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    else:
        child.pop("PYTHONPATH", None)  # packages of the training environment do not belong in vLLM's
        if not gpus:
            child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with the training
    return child


def visible_gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs the server may use: CUDA_VISIBLE_DEVICES, else what nvidia-smi lists, else 0."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([part for part in listed.split(",") if part.strip() and part.strip() != "-1"])
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines()) if found.returncode == 0 else 0


def tensor_parallel_size(gpus: int, text_config: Mapping) -> int:
    """The largest power of two of the GPUs that divides the attention heads and agrees with the key/value heads.

    Agreeing: key/value heads are divided evenly or each is copied evenly. Qwen2.5-VL-7B (28 and 4 heads): at most 4.
    """
    heads = int(text_config.get("num_attention_heads", 1))
    shared = int(text_config.get("num_key_value_heads", heads))
    size = 1
    while 2 * size <= gpus and heads % (2 * size) == 0 and (shared % (2 * size) == 0 or (2 * size) % shared == 0):
        size *= 2
    return size


def _version(python: str, package: str) -> str | None:
    """The version of an importable package of another interpreter; None if it lacks it."""
    code = (
        "import importlib.util as u, importlib.metadata as m, sys; name = sys.argv[1]\n"
        "if u.find_spec(name) is None: sys.exit(3)\n"
        "print(next((m.version(d) for d in m.packages_distributions().get(name, [])), 'unknown'))"
    )
    try:
        found = subprocess.run(
            [python, "-c", code, package], capture_output=True, text=True, timeout=60, check=False, cwd="/"
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
