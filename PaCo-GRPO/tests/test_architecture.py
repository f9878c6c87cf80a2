"""Imports point one way, also those inside functions, and there are no circles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paco_grpo"
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


def imports(file: Path) -> set[str]:
    """paco_grpo modules that ``file`` imports, those of TYPE_CHECKING blocks left out."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    ignored = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("paco_grpo.")}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_point_one_way(room):
    for file in sorted((PACKAGE / room).rglob("*.py")):
        rooms = {name.split(".")[1] for name in imports(file)} & (set(ALLOWED) | LOOP)
        assert rooms - {room} <= ALLOWED[room], f"{file.relative_to(PACKAGE)} imports {rooms - {room} - ALLOWED[room]}"


def test_no_circles():
    files = {
        ".".join(("paco_grpo", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    reach = {
        name: {other for other in imports(path) if other in files and other != name} for name, path in files.items()
    }
    while any(reach[other] - found for found in reach.values() for other in found):
        reach = {name: found.union(*(reach[other] for other in found)) for name, found in reach.items()}
    assert sorted(name for name, found in reach.items() if name in found) == []


def test_no_objective_is_named_outside_objectives():
    for file in PACKAGE.rglob("*.py"):
        if "objectives" not in file.parts and file.name not in ("schema.py",):
            assert '"nft"' not in file.read_text(encoding="utf-8"), file
