"""Imports point one way, also those inside functions, and there are no circles."""

from pathlib import Path

import pytest

import survey

PACKAGE = Path(__file__).parent.parent / "paco_grpo"
IMPORTS = survey.import_graph(survey.read_modules(PACKAGE.parents[1]))
LOOP = {"training", "evaluation", "checkpoint", "monitoring"}
# Package → what it may import from paco_grpo besides itself, types and suggest.
ALLOWED = {
    "options": set(),
    "data": {"options"},
    "policies": {"options"},
    "rewards": {"options", "distributed", "data"},
    "advantages": {"options"},
    "sampling": {"options", "policies", "data"},
    "objectives": {"options", "policies", "sampling"},
    "distributed": {"options", "policies"},
    "monitoring": {"options", "policies", "sampling", "distributed"},
    "checkpoint": {"options", "policies", "data", "distributed"},
    "evaluation": {"options", "policies", "sampling", "rewards", "distributed", "monitoring"},
    "report": set(),
}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_point_one_way(room):
    for name, imported in IMPORTS.items():
        if f"{name}.".startswith(f"paco_grpo.{room}."):
            rooms = {other.split(".")[1] for other in imported if other.startswith("paco_grpo.")}
            wrong = rooms & (set(ALLOWED) | LOOP) - {room} - ALLOWED[room]
            assert not wrong, f"{name} imports {wrong}"


def test_no_circles():
    assert survey.find_circles(IMPORTS) == []


def test_no_objective_is_named_outside_objectives():
    for file in PACKAGE.rglob("*.py"):
        if "objectives" not in file.parts and file.name not in ("schema.py",):
            assert '"nft"' not in file.read_text(encoding="utf-8"), file
