"""Imports point one way, also those inside functions, and there are no circles."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paco_grpo"


def import_graph():
    """Module → the modules of the package that it imports, but for type checking."""
    trees = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        trees[name.removesuffix(".__init__")] = ast.parse(file.read_text())
    graph = {}
    for module, tree in trees.items():
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)[:20]]
        named = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module} imports relatively"
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= parts & trees.keys() or {node.module}
        graph[module] = named & trees.keys() - {module}
    return graph


IMPORTS = import_graph()
LOOP = {"training", "evaluation", "monitoring"}
# Package → what it may import from paco_grpo besides itself, types and names.
ALLOWED = {
    "options": set(),
    "data": {"options"},
    "policies": {"options"},
    "rewards": {"options", "distributed", "data", "advantages"},
    "advantages": {"options"},
    "sampling": {"options", "policies", "data"},
    "objectives": {"options", "policies", "sampling"},
    "distributed": {"options", "policies"},
    "monitoring": {"options", "policies", "sampling", "distributed"},
    "evaluation": {
        "options",
        "policies",
        "sampling",
        "rewards",
        "distributed",
        "monitoring",
        "data",
    },
    "report": {"evaluation", "monitoring"},
}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_point_one_way(room):
    for name, imported in IMPORTS.items():
        if f"{name}.".startswith(f"paco_grpo.{room}."):
            rooms = {other.split(".")[1] for other in imported if other.startswith("paco_grpo.")}
            wrong = rooms & (set(ALLOWED) | LOOP) - {room} - ALLOWED[room]
            assert not wrong, f"{name} imports {wrong}"


def test_no_circles():
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError
