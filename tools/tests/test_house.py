"""House rules over every file that git knows."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(
    ["git", "-C", str(REPO), "ls-files"], check=True, capture_output=True, text=True
).stdout
FILES = [REPO / name for name in LISTED.splitlines() if (REPO / name).is_file()]


def test_ruff_is_clean():
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q"], cwd=REPO, check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "--check"], cwd=REPO, check=True)


def test_annotations_tell_the_truth():
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    subprocess.run(command, cwd=REPO, check=True)


def _anchor(heading: str) -> str:
    """As Markdown viewers make it: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_links_between_our_pages_lead_somewhere():
    broken = []
    for page in FILES:
        links = []
        if page.suffix == ".md":
            links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", _prose(page))
        for place, anchor in links:
            target = (page.parent / place).resolve() if place else page
            if target.exists() and anchor:
                headings = re.findall(r"^#+ (.*)$", _prose(target), flags=re.MULTILINE)
                is_there = anchor in map(_anchor, headings)
            else:
                is_there = target.exists()
            if not is_there:
                broken.append((page.name, place, anchor))
    assert broken == []


def test_versions_agree():
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    files = [path for path in FILES if path.name in ("pyproject.toml", "CITATION.cff")]
    versions = set()
    for path in files:
        versions |= set(re.findall(r'^version(?: =|:) "?([\d.]+)', path.read_text(), re.MULTILINE))
    assert versions == {f"{newest}.0"}
