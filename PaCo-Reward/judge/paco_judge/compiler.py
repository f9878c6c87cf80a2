"""What torch.compile and vLLM need on a GPU: Triton compiles C programs against Python.h."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def missing_for_compilation(include: str | Path | None = None) -> str | None:
    """What is missing for compiled runs, and how to install it; None: nothing.

    Args:
        include: Folder of Python.h; None: of this interpreter.
    """
    include = Path(include or sysconfig.get_path("include", "posix_prefix"))
    missing = []
    if not any(map(shutil.which, [os.environ.get("CC") or "gcc", "clang"])):
        missing.append("a C compiler (gcc)")
    if not (include / "Python.h").is_file():
        missing.append(f"{include}/Python.h")
    if not missing:
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"torch.compile and vLLM on GPUs need {' and '.join(missing)}. On Debian and Ubuntu: "
        f"`apt-get install gcc python{version}-dev`; without root: `conda install gcc_linux-64` and "
        "CC=x86_64-conda-linux-gnu-gcc, or a Python with its headers, such as uv's or conda's"
    )


def main() -> int:
    """Print what is missing; 1 if something is."""
    problem = missing_for_compilation()
    if problem:
        print(f"note: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
