"""No option without a word on what it means, and none that no test turns (house mistake 4: an option nothing reads)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from named import load

from paco_grpo.training.configuration import option_names

TESTS = Path(__file__).resolve().parents[1]
OPTIONS = sorted(option_names(load("t2is")))
# What these tests turn they only read, print or refuse; the others start something with it.
_READING_ALONE = TESTS / "config"
# Calls whose keywords are options, `__` standing for a dot (tests/tiny_run.py).
_RUNS = {
    "tiny_config",
    "tiny_edit_config",
    "overrides_for",
    "config_for",
    "make",
    "weights_after",
    "start",
    "evaluated",
}


def turned(tree: ast.AST) -> Iterator[str]:
    """Names that a test file gives a value: ``f(train__x=1)``, ``{"train__x": 1}``, ``--config.train.x``, ``config.x = 1``."""
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
def tested() -> set[str]:
    files = [path for path in TESTS.rglob("test_*.py") if _READING_ALONE not in path.parents]
    return {name for path in files for name in turned(ast.parse(path.read_text()))}


@pytest.mark.parametrize("option", OPTIONS)
def test_some_test_turns_it(option, tested):
    assert option in tested, f"no test turns config.{option}: add it to tests/training/test_options.py"
