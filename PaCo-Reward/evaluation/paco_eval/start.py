"""Starts the published programs, also in an environment that has vLLM and nothing of ours."""

import importlib
import importlib.util
import sys
from pathlib import Path

EVALUATION = Path(__file__).resolve().parents[1]
PACKAGES = {
    "aiohttp": "aiohttp",
    "filelock": "filelock",
    "numpy": "numpy",
    "pandas": "pandas",
    "scipy": "scipy",
    "tqdm": "tqdm",
    "PIL": "pillow",
}


def start(program: str, main: str = "main") -> int:
    """The exit status of a module's ``main``; 1 where packages are missing."""
    missing = [PACKAGES[name] for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: {sys.executable} lacks {', '.join(missing)}; run: "
            f"pip install -r {EVALUATION}/requirements.txt",
            file=sys.stderr,
        )
        return 1
    if importlib.util.find_spec("paco_judge") is None:
        sys.path.append(str(EVALUATION.parent / "judge"))
    return getattr(importlib.import_module(f"paco_eval.{program}"), main)()
