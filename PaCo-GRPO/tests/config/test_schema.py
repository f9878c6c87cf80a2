"""Every option is documented, read by the program and changed by some test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paco_grpo.options import OPTIONS
from paco_grpo.options.__main__ import page

TESTS = Path(__file__).resolve().parents[1]
# These tests only read, print or refuse options; the others run something with them.
_READ_ONLY = TESTS / "config"
# Calls whose keywords are options, with `__` for a dot (tests/tiny_run.py).
_RUNS = {
    "tiny_options",
    "tiny_edit_options",
    "overrides_for",
    "config_for",
    "make",
    "weights_after",
    "start",
    "evaluated",
}


def changed_options(tree: ast.AST) -> Iterator[str]:
    """Names that a test sets: ``f(train__x=1)``, ``{"train__x": 1}``, ``--config.train.x``, ``config.x = 1``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _RUNS:
            yield from (keyword.arg.replace("__", ".") for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Dict):
            keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
            yield from (key.replace("__", ".") for key in keys if isinstance(key, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"--(?:no)?config\.([\w.]+)", node.value)
        elif isinstance(node, ast.Assign):
            yield from (ast.unparse(target).rpartition("config.")[2] for target in node.targets)


@pytest.fixture(scope="module")
def changed() -> set[str]:
    files = [path for path in TESTS.rglob("test_*.py") if _READ_ONLY not in path.parents]
    return {name for path in files for name in changed_options(ast.parse(path.read_text()))}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_test_changes_every_option(option, changed):
    assert option in changed, f"no test changes config.{option}: add it to tests/training/test_options.py"


def test_configuration_page_is_current():
    assert (TESTS.parents[1] / "docs" / "configuration.md").read_text() == page()
    assert all(option.meaning and f"| `{name}` |" in page() for name, option in OPTIONS.items())
