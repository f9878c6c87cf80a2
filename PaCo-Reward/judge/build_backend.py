"""setuptools as the build backend, fetched for the build where the environment has none.

The published command installs with ``--no-build-isolation``, so that the environment has to bring
setuptools. conda's do. Those of Python 3.12's ``venv`` and of uv do not.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile

REQUIREMENT = "setuptools>=77"

if importlib.util.find_spec("setuptools") is None:
    folder = tempfile.TemporaryDirectory(prefix="paco-build-")  # deleted when the build ends
    installer = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        installer = [os.environ.get("UV", "uv"), "pip"]
    command = [*installer, "install", "--quiet", "--target", folder.name, REQUIREMENT]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        sys.exit(
            f"The build needs setuptools, which could not be installed: pip install '{REQUIREMENT}'"
        )
    sys.path.insert(0, folder.name)

from setuptools.build_meta import *
