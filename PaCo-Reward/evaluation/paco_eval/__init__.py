"""Benchmarks of the judge: what they ask, one loop that scores them, and tables of the results."""

import importlib
import importlib.util
import sys
from pathlib import Path

EVALUATION = Path(__file__).resolve().parents[1]


def start(program: str, main: str = "main") -> int:
    """The exit status of a module's ``main``, also in an environment that has nothing of ours.

    1 where a package is missing.
    """
    if importlib.util.find_spec("paco_judge") is None:
        sys.path.append(str(EVALUATION.parent / "judge"))
    try:
        module = importlib.import_module(f"paco_eval.{program}")
    except ModuleNotFoundError as error:
        print(
            f"error: {sys.executable} lacks {error.name}; run: "
            f"pip install -r {EVALUATION}/requirements.txt",
            file=sys.stderr,
        )
        return 1
    return getattr(module, main)()
