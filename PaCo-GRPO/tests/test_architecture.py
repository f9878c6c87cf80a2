"""Arrows point one way: config → training → the six rooms, which do not import each other."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paco_grpo"
ROOMS = ("policies", "sampling", "objectives", "advantages", "rewards", "data")
SHARED = ("paco_grpo.types", "paco_grpo.transfer")
# What one room may know of another. Objectives recompute a step with the function that the rollout used, so that the
# first ratio is exactly 1; of policies both know the interface alone.
ALLOWED = {
    "sampling": {"paco_grpo.policies.base"},
    "objectives": {"paco_grpo.policies.base", "paco_grpo.sampling.rollout", "paco_grpo.sampling.sde"},
}


def imported_modules(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_do_not_import_each_other(room):
    for file in sorted((PACKAGE / room).rglob("*.py")):
        foreign = {
            module
            for module in imported_modules(file)
            if module.startswith("paco_grpo.")
            and module not in SHARED
            and not module.startswith("paco_grpo.options")
            and not (module + ".").startswith(f"paco_grpo.{room}.")
        }
        assert foreign <= ALLOWED.get(room, set()), f"{file.relative_to(PACKAGE)} imports {foreign}"


@pytest.mark.parametrize("module", SHARED)
def test_what_all_share_knows_nobody(module):
    file = PACKAGE / f"{module.removeprefix('paco_grpo.')}.py"
    assert not any(name.startswith("paco_grpo") for name in imported_modules(file))
