"""The programs in scripts/ as modules."""

import importlib.util
from types import ModuleType

from tiny_run import ROOT


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"paco_grpo_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
