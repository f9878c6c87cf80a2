"""Sections of docs/method.md that other files cite."""

import re
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_cited_sections_exist():
    page = (REPO / "docs" / "method.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\d+)\. ", page, flags=re.MULTILINE))
    command = ["git", "-C", str(REPO), "grep", "-hE", "docs/method.md §[0-9]"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cited = set(re.findall(r"docs/method\.md §(\d+)", lines))
    assert cited and cited <= sections
    assert set(re.findall(r"§(\d+)", page)) <= sections
