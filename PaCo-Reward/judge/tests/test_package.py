"""paco-judge installs alone, from its folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_judge
from fakes import fake_judge

JUDGE = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from paco_judge import Judge
from paco_judge.grid import split_prompt
print(Judge(sys.argv[1], model="mine").score("a.png", "b.png", theme="boats"))
try:
    Judge.from_pretrained("org/judge")
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_a_wheel_in_a_fresh_environment_scores_over_a_server(tmp_path):
    def run(*command):
        done = subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = shutil.copytree(JUDGE, tmp_path / "source")
    run(sys.executable, "-m", "venv", "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    run(python, "-m", "pip", "install", wheel)
    for number, name in enumerate("ab"):
        tiny_judge.picture(number).save(tmp_path / f"{name}.png")
    respond = lambda number, request: (200, fake_judge.answer(0.375), {})
    with fake_judge.FakeJudge(respond, models=["mine"]) as server:
        score, problem = run(python, "-c", PROGRAM, server.url).splitlines()
    assert float(score) == pytest.approx(0.375)
    assert "torch" in problem and "paco-judge[scorer]" in problem
