"""House rules over every file that git knows, and over skipped tests."""

import re
import subprocess
import sys
from pathlib import Path

pytest_plugins = ["pytester"]
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
    pages = [path for path in FILES if path.suffix == ".md"]
    prose = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages}
    broken = []
    for page, text in prose.items():
        for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            target = (page.parent / place).resolve() if place else page
            # A Markdown viewer gives headings anchors in lower case, without punctuation, with hyphens for spaces.
            headings = re.findall(r"^#+ (.*)$", prose.get(target, ""), flags=re.MULTILINE)
            anchors = {"", *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)}
            if "://" not in place and not (target.exists() and anchor in anchors):
                broken.append((str(page.relative_to(REPO)), place, anchor))
    assert broken == []


SKIPS = """
import pytest
def test_ok(): pass
@pytest.mark.parametrize("reason", ["no GPU", "shared/data absent", "feeling tired", "no GPU today"])
def test_skips(reason): pytest.skip(reason)
@pytest.mark.skipif(True, reason="no GPU")
def test_gpu(): pass
@pytest.mark.xfail(strict=True)
def test_known(): assert False
"""
MODULE = "import pytest\nmissing = pytest.importorskip('no_such_module')\ndef test_a(): pass\n"


def test_only_allowed_reasons_for_skipping_pass_also_in_xdists_workers(pytester):
    pytester.makeconftest((REPO / "conftest.py").read_text())
    pytester.makepyfile(test_skips=SKIPS, test_module=MODULE)
    options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--continue-on-collection-errors")
    result = pytester.runpytest_subprocess(*options, "-n", "2")
    assert result.ret == 1
    result.assert_outcomes(passed=1, skipped=3, xfailed=1, failed=2, errors=1)
    for part in ("'feeling tired'", "'no GPU today'", "no_such_module"):
        assert part in result.stdout.str()
