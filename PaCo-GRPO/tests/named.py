"""Named configurations of config/grpo.py, with overrides, for tests."""

import inspect
import runpy
from pathlib import Path

from ml_collections import ConfigDict

from paco_grpo.estimate.table import SUFFIXES
from paco_grpo.options import make_options
from paco_grpo.options.parse import named_configuration

CONFIG = Path(__file__).resolve().parents[1] / "config"
_FILE = runpy.run_path(str(CONFIG / "grpo.py"))
FUNCTIONS = [
    name
    for name, value in _FILE.items()
    if inspect.isfunction(value)
    and inspect.signature(value).return_annotation is ConfigDict
    and name != "config_dict"
]
# Those of no one model, and the toys, need what their model needs.
REAL = [name for name in FUNCTIONS if name != "editing" and not name.startswith(("toy_", "any_"))]
# With each suffix of memory, and four with the others, too.
SIZED = []
for _name in REAL:
    for _suffix in _FILE["SUFFIXES"]:
        is_example = _name in ("t2is", "t2is_variety", "kontext_editing", "ocr")
        edits = _name == "kontext_editing" or _suffix != "_product"
        if _suffix in SUFFIXES or (is_example and edits):
            SIZED.append(_name + _suffix)
NAMES = sorted({*FUNCTIONS, *SIZED} - {"editing"})


def load(name="toy_t2is", *overrides):
    """The options of a named configuration; ``overrides`` are pairs of name and text."""
    return make_options(named_configuration(_FILE, name).to_dict(), overrides)


def load_with_suffixes():
    """Name and options of every configuration, alone and with each suffix."""
    for name in FUNCTIONS:
        for suffix in ("", *_FILE["SUFFIXES"]):
            yield name + suffix, load(name + suffix)
