"""House rules that a machine can check, over every file that git knows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TEXT = {".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".in", ".json", ".html", ""}
# Written in two parts, or this file would be the first to break the rule.
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "download." + "pytorch.org", "registry." + "npmjs", "deb." + "debian.org"]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", str(REPO), "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    return [REPO / name for name in listed if name and (REPO / name).is_file()]


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def test_no_registry_hosts():
    found = [(path.name, host) for path in FILES if path.suffix in TEXT and path.stat().st_size < 2_000_000
             for host in HOSTS if host in path.read_text(errors="replace")]  # fmt: skip
    assert found == []


def test_ruff_is_clean():
    command = [sys.executable, "-m", "ruff", "check", "--config", str(REPO / "pyproject.toml"), *map(str, PYTHON)]
    done = subprocess.run(command, cwd=REPO, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_files_stay_readable_in_one_sitting():
    long = {str(path.relative_to(REPO)): n for path in PYTHON if (n := path.read_text().count("\n")) > 420}
    assert long == {}


def test_nothing_is_pickled():
    found = []
    for path in PYTHON:
        if path == Path(__file__):
            continue
        text = path.read_text()
        found += [(path.name, m) for m in re.findall(r"^\s*import pickle|pickle\.loads?\(", text, flags=re.MULTILINE)]
        found += [(path.name, call) for call in re.findall(r"torch\.load\([^)]*\)", text) if "weights_only=True" not in call]
    assert found == []


@pytest.mark.parametrize("script", [p for p in FILES if p.suffix == ".sh" or p == REPO / ".ci/run"], ids=lambda p: str(p.relative_to(REPO)))
def test_shell_scripts_parse(script):
    done = subprocess.run([shutil.which("bash"), "-n", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in FILES if p.suffix == ".md"], ids=lambda p: str(p.relative_to(REPO)))
def test_links_between_our_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_repository_stays_small():
    """Model weights are committed once; git keeps every version."""
    weights = sum(path.stat().st_size for path in FILES if path.suffix == ".safetensors")
    assert weights <= 24 * 2**20
    assert sum(path.stat().st_size for path in FILES) <= 40 * 2**20
