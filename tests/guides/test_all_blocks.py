"""Every line of the published guides that a user types stands in a test that runs it."""

import re

import pytest
from terminal import REPOSITORY

GUIDES = REPOSITORY.parent / "shared" / "guides"
TESTS = ("tests/guides", "PaCo-GRPO/tests/config", "PaCo-GRPO/tests/rewards", "PaCo-Reward/tests")


def typed(block: str) -> set[str]:
    stripped = (
        line.split(" #")[0].strip().removesuffix("\\").strip() for line in block.splitlines()
    )
    return {line for line in stripped if line and not line.startswith("#")}


@pytest.mark.skipif(not GUIDES.is_dir(), reason="shared/guides absent")
@pytest.mark.parametrize("guide", ["paco-rl.md", "paco-grpo.md", "paco-reward.md"])
def test_every_line_is_run(guide):
    page = re.sub(r'""".*?"""', "", (GUIDES / guide).read_text(errors="replace"), flags=re.DOTALL)
    blocks = re.findall(r"```(?:bash|python|yaml)\n(.*?)```", page, re.DOTALL)
    tests = "\n".join(
        file.read_text() for folder in TESTS for file in sorted((REPOSITORY / folder).rglob("*.py"))
    )
    missing = [line for line in sorted(set().union(*map(typed, blocks))) if line not in tests]
    assert not missing, "\n".join(missing)
