"""The build backend of ``../judge``: a backend has to lie in the folder that it builds."""

import runpy
from pathlib import Path

JUDGE = Path(__file__).resolve().parent.parent / "judge"

judge_backend = runpy.run_path(
    str(JUDGE / "build_backend.py")
)  # brings setuptools, for as long as it is referred to

from setuptools.build_meta import *
