"""Imports point one way, also those inside functions."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "paco_grpo"
# A package or module imports from those before it; the other modules are for everybody.
ORDER = [
    "options",
    "data",
    "policies",
    "distributed",
    "sampling",
    "objectives",
    "advantages",
    "rewards",
    "monitoring",
    "evaluation",
    "report",
    "training",
    "commands",
]


def test_imports_point_one_way():
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        later = ORDER[ORDER.index(room) + 1 :] if room in ORDER else []
        imported = re.findall(
            r"^ *(?:from|import) paco_grpo\.(\w+)", file.read_text(), re.MULTILINE
        )
        assert set(imported).isdisjoint(later), file
