"""The build backend of ``../judge``, under a name that this folder's pyproject.toml may use."""

import runpy
from pathlib import Path

JUDGE = Path(__file__).resolve().parent.parent / "judge"

globals().update(runpy.run_path(str(JUDGE / "build_backend.py")))
