"""The judge benchmark of docs/recipes.md, as printed."""

import re
import runpy
import sys

import pytest
from bench_tools import HERE, ContentJudge, read_lines, save_picture, write_lines
from pairing_tools import digest, p_yes_of
from scipy.stats import spearmanr

from paco_eval import benchmark
from paco_judge.images import read_image
from paco_judge.questions import load_question

PAGE = HERE.parents[1] / "docs" / "recipes.md"


def test_the_recipe_correlates_opinions_and_scores(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(# my_benchmark.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_benchmark.py").write_text(code)
    rows = []
    expected = []
    for number in range(6):
        names = [
            save_picture(tmp_path, f"{number}{side}.png", 9 * number + side) for side in (1, 2)
        ]
        images = [digest(read_image(tmp_path / name)) for name in names]
        expected.append(p_yes_of(*images, load_question("pair").text()))
        opinion = 1 + number * 5 % 7 / 2
        rows.append({"id": 3 * number, "a": names[0], "b": names[1], "opinion": opinion})
    write_lines(tmp_path / "pairs.jsonl", [*rows, rows[1] | {"id": 5, "a": "none.png"}])
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "make_engine", lambda args: ContentJudge())
    monkeypatch.setattr(sys, "argv", ["x", "--pairs", "pairs.jsonl", "--model", "judge"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("my_benchmark.py", run_name="__main__")
    assert ended.value.code == 1  # an image is missing
    printed = capsys.readouterr()
    assert "item 5" in printed.err
    results = read_lines(tmp_path / "results" / "judge.jsonl")
    assert [row["score"] for row in results] == expected
    correlation = spearmanr([row["opinion"] for row in rows], expected).statistic
    model, number = printed.out.splitlines()[-1].split()
    assert (model, float(number)) == (str(tmp_path / "judge"), pytest.approx(correlation))
