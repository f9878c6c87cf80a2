"""Imports point one way, also those inside functions and for types."""

import ast
from graphlib import TopologicalSorter
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
    "monitoring",
    "rewards",
    "evaluation",
    "report",
    "training",
    "commands",
]


def imports_of_modules() -> dict[str, set[str]]:
    """Module → the modules of paco_grpo that it imports anywhere."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE.parent).with_suffix("")
        files[".".join(place.parts).removesuffix(".__init__")] = file
    imports = {}
    for module, file in files.items():
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        imports[module] = names & files.keys()
    return imports


def test_imports_point_one_way():
    for module, imported in imports_of_modules().items():
        room = f"{module}.".split(".")[1]
        later = ORDER[ORDER.index(room) + 1 :] if room in ORDER else []
        assert {f"{name}.".split(".")[1] for name in imported}.isdisjoint(later), module


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter(imports_of_modules()).prepare()
