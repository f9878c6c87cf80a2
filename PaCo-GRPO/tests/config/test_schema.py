"""Every option is documented and changed by some test."""

import re
from pathlib import Path

import pytest

from paco_grpo.options import OPTIONS
from paco_grpo.options.__main__ import page

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def mentioned() -> set[str]:
    """Option names in the tests that run something; those in this folder only read, print or refuse options.

    ``__`` stands for a dot in keyword arguments (tests/tiny_run.py).
    """
    texts = [path.read_text() for path in TESTS.rglob("test_*.py") if path.parent != Path(__file__).parent]
    return {word.replace("__", ".") for text in texts for word in re.findall(r"(?:[a-z]+\.)?\w+", text)}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_test_changes_every_option(option, mentioned):
    assert option in mentioned, f"no test changes config.{option}: add it to tests/training/test_options.py"


def test_configuration_page_is_current():
    assert (TESTS.parents[1] / "docs" / "configuration.md").read_text() == page()
    assert all(option.description and f"| `{name}` |" in page() for name, option in OPTIONS.items())
