"""benchmarks/compare_commits.py: commits take turns, and the ratio is that of their work."""

import subprocess

import pytest

import compare_commits

# Works and records as scripts/train.py does; notes when it saw another one running.
TRAIN = """
import json, sys, time
from pathlib import Path
given = dict(word[9:].split("=", 1) for word in sys.argv if word.startswith("--config."))
assert Path.cwd().name == "PaCo-GRPO" and given["sample.batch_size"] == "16" and Path(given["dataset"]).is_dir()
folder = Path(given["save_dir"]) / given["run_name"]
folder.mkdir(parents=True)
work = {work} / int(given.get("sample.tail_steps", 1))
for epoch in range(1000):
    end = time.thread_time() + work
    while time.thread_time() < end:
        pass
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({{"phase": "train", "epoch": epoch}}) + "\\n")
"""


def commit(repository, text):
    (repository / "PaCo-GRPO" / "scripts" / "train.py").write_text(text)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "work"], check=True)


@pytest.mark.slow
def test_a_commit_with_half_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_commits, "SLICE", 0.05)
    (tmp_path / "PaCo-GRPO" / "scripts").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, TRAIN.format(work=0.4))
    commit(tmp_path, TRAIN.format(work=0.2))
    page = compare_commits.compare("HEAD~1", ["", "sample.tail_steps=2"], rounds=2, repository=tmp_path)
    half, quarter = (float(line.split("|")[3].split()[0]) for line in page.splitlines()[3:])
    assert 0.4 < half < 0.6 and 0.2 < quarter < 0.35, page
    assert "| `HEAD~1` |" in page and "| `as configured` |" in page and capsys.readouterr().err.count("\n") == 2
    listed = subprocess.check_output(["git", "-C", str(tmp_path), "worktree", "list"], text=True)
    assert listed.count("\n") == 1


def test_a_trainer_that_ends_is_an_error(tmp_path):
    (tmp_path / "PaCo-GRPO" / "scripts").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, "raise SystemExit('error: no such option')")
    with pytest.raises(RuntimeError, match="HEAD ended with status 1:\nerror: no such option"):
        compare_commits.compare("HEAD", [""], rounds=1, repository=tmp_path)
