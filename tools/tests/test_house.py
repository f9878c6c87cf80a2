"""House rules over every file that git knows."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(["git", "-C", str(REPO), "ls-files"], check=True, capture_output=True, text=True).stdout
FILES = [REPO / name for name in LISTED.splitlines() if (REPO / name).is_file()]
PYTHON = [path for path in FILES if path.suffix == ".py"]
TEXT = {".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".in", ".json", ".html", ""}
# Written in two parts, or this file would break the rule.
HOSTS = [
    "py" + "pi.org", "python" + "hosted.org", "download." + "pytorch.org", "registry." + "npmjs", "deb." + "debian.org"
]  # fmt: skip


def test_no_registry_hosts():
    texts = {path: path.read_text(errors="replace") for path in FILES if path.suffix in TEXT}
    assert [(path.name, host) for path, text in texts.items() for host in HOSTS if host in text] == []


def test_ruff_is_clean():
    command = [sys.executable, "-m", "ruff", "check", "--config", str(REPO / "pyproject.toml"), *map(str, PYTHON)]
    done = subprocess.run(command, cwd=REPO, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_nothing_is_pickled():
    found = []
    for path in set(PYTHON) - {Path(__file__)}:
        text = path.read_text()
        found += [(path.name, m) for m in re.findall(r"^\s*import pickle|pickle\.loads?\(", text, flags=re.MULTILINE)]
        found += [(path.name, m) for m in re.findall(r"torch\.load\([^)]*\)", text) if "weights_only=True" not in m]
    assert found == []


def test_links_between_our_pages_lead_somewhere():
    broken = []
    for page in [path for path in FILES if path.suffix == ".md"]:
        for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", _prose(page)):
            target = page.parent / place if place else page
            if "://" not in place and not (target.exists() and (not anchor or anchor in _anchors(target))):
                broken.append((str(page.relative_to(REPO)), place, anchor))
    assert broken == []


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer gives to headings: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
