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


def test_nothing_is_pickled():
    pickled = []
    for path in FILES:
        if path.suffix != ".py" or path == Path(__file__):
            continue
        text = path.read_text()
        calls = re.findall(r"^\s*import pickle|pickle\.loads?\(", text, flags=re.MULTILINE)
        for load in re.findall(r"torch\.load\([^)]*\)", text):
            if "weights_only=True" not in load:
                calls.append(load)
        pickled += [(path.name, call) for call in calls]
    assert pickled == []


def _anchor(heading: str) -> str:
    """As Markdown viewers make it: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_between_our_pages_lead_somewhere():
    pages = [path for path in FILES if path.suffix == ".md"]
    prose = {
        page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for page in pages
    }
    broken = []
    for page, text in prose.items():
        for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            target = (page.parent / place).resolve() if place else page
            headings = re.findall(r"^#+ (.*)$", prose.get(target, ""), flags=re.MULTILINE)
            anchors = {"", *(_anchor(heading) for heading in headings)}
            if "://" not in place and not (target.exists() and anchor in anchors):
                broken.append((str(page.relative_to(REPO)), place, anchor))
    assert broken == []


def test_versions_agree():
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    files = [path for path in FILES if path.name in ("pyproject.toml", "CITATION.cff")]
    versions = set()
    for path in files:
        versions |= set(re.findall(r'^version(?: =|:) "?([\d.]+)', path.read_text(), re.MULTILINE))
    assert versions == {f"{newest}.0"}
