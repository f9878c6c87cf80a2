"""Imports point one way, also those inside functions, and there are no circles."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paco_grpo"


def imports_of(node, package, known):
    """The modules of ``known`` that a node imports, without those for type checking."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        source = ".".join(filter(None, (above, node.module)))
        for name in (f"{source}.{alias.name}" for alias in node.names):
            yield from ({name if name in known else source} & known)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, package, known)


def import_graph():
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
        for file in PACKAGE.rglob("*.py")
    }
    known = {name.removesuffix(".__init__") for name in files}
    graph = {}
    for name, file in files.items():
        package = name.rpartition(".")[0]
        module = name.removesuffix(".__init__")
        graph[module] = set(imports_of(ast.parse(file.read_text()), package, known)) - {module}
    return graph


IMPORTS = import_graph()
LOOP = {"training", "evaluation", "checkpoint", "monitoring"}
# Package → what it may import from paco_grpo besides itself, types and names.
ALLOWED = {
    "options": set(),
    "data": {"options"},
    "policies": {"options"},
    "rewards": {"options", "distributed", "data"},
    "advantages": {"options", "rewards"},
    "sampling": {"options", "policies", "data"},
    "objectives": {"options", "policies", "sampling"},
    "distributed": {"options", "policies"},
    "monitoring": {"options", "policies", "sampling", "distributed"},
    "checkpoint": {"options", "policies", "data", "distributed"},
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
