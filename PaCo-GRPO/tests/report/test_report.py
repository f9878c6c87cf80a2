"""A run directory becomes one page: self-contained, complete, and clear about what is missing."""

import json
import re
import shutil

import numpy as np
from alternatives import Alternatives
from tiny_run import rows_of

from paco_grpo.options import RunOptions, options_to_yaml
from paco_grpo.report.__main__ import main
from paco_grpo.report.names import Name
from paco_grpo.report.page import Page, write_report
from paco_grpo.report.run import read_run
from paco_judge.files import read_json_lines


def test_a_whole_page(trained_run, tmp_path):
    """The first of three evaluations, with lower scores and its images in another order."""
    folder = shutil.copytree(trained_run.folder, tmp_path / "run")
    last = folder / "eval" / "epoch_0002"
    shutil.copytree(last, folder / "eval" / "epoch_0001")
    first = shutil.copytree(last, folder / "eval" / "epoch_0000")
    rows = read_json_lines(last / "eval_data.jsonl")
    files = [row["file"] for row in rows]
    for evaluation, lower in ((last, 0), (first, 1)):
        for number, row in enumerate(rows):
            row["prompt"] = f"<b> {number}"
            row["rewards"]["brightness"] -= lower * (number + 1)
            row["file"] = files[number - lower]
        lines = [json.dumps(row) + "\n" for row in rows]
        (evaluation / "eval_data.jsonl").write_text("".join(lines))
    shutil.copytree(first, folder / "eval" / "epoch_0003_mine")
    (folder / "eval" / "epoch_0004").mkdir()  # an evaluation that is going on
    page = Page(
        title="A <title>",
        names={"brightness": Name("bright & red", "Read from pixels.")},
        evidence=[{"label": "Table", "meaning": "", "head": ["", "n"], "rows": [["x", 7]]}],
        seconds={"world": 12.0, "judge": 312.0},
    )
    out = tmp_path / "out" / "report.html"
    metrics = folder / "metrics.jsonl"
    evaluated = rows_of(trained_run.options, "eval")[-1]
    lines = []
    for epoch, lower in enumerate((3, 1)):
        mean = evaluated["eval/brightness_mean"] - lower
        lines.append(json.dumps(evaluated | {"epoch": epoch, "eval/brightness_mean": mean}) + "\n")
    metrics.write_text("".join([*lines, metrics.read_text()]))
    (folder / "log.txt").write_text(
        "2026-11-29 19:13:27,994 WARNING paco_grpo.a: <too> long\n"
        "2026-11-29 19:13:28,001 INFO paco_grpo.a: quiet\nsecond line\n"
        "2026-11-29 19:14:27,994 WARNING paco_grpo.monitoring.signs: a sign\n"
        "2026-11-29 20:13:27,994 WARNING paco_grpo.a: <too> long\n"
    )
    run = read_run(folder)
    epochs = rows_of(trained_run.options, "train")
    sampling = [row["time/sample_s"] for row in epochs]
    assert run.seconds["sampling"] == sum(sampling) > max(sampling)
    deviations = [row["reward/brightness_std"] for row in epochs]
    _, _, errors, counts = run.train["brightness"].T
    np.testing.assert_allclose(errors, np.array(deviations) / 8**0.5)  # of the images of an epoch
    assert set(counts) == {8} and set(run.test["brightness"][:, 3]) == {5}
    write_report(run, out, page)
    text = out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"}
    for part in ("A &lt;title&gt;", "&lt;b&gt; 3", "2 of 2 epochs", "world 0.2, judge 5.2"):
        assert part in text
    assert "<td>7</td>" in text and "+3.000" in text  # since the first evaluation
    # Five images in pairs: those that changed most and least, and the other three.
    assert "bright &amp; red +5.00" in text and "bright &amp; red +1.00" in text
    assert "Fell" not in text  # all rose
    assert text.count("<figure>") == 2 * 5
    assert "&lt;too&gt; long (2 times)" in text and "quiet" not in text and "a sign" not in text
    alternatives = Alternatives(text).texts
    assert len(alternatives) == text.count("<img") and "" not in alternatives
    number, after = 2, rows[2]["rewards"]["brightness"] + 3
    (shown,) = [alt for alt in alternatives if "after" in alt and alt.endswith(f"<b> {number}")]
    assert f"bright & red {after:.2f}" in shown


def test_a_run_that_has_only_begun(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    assert main([str(tmp_path)]) == 1  # before its first row, as in a folder that is no run's
    error = capsys.readouterr().err
    assert str(metrics) in error and "Errno" not in error
    metrics.write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "out" / "r.html")]) == 1
    assert str(tmp_path) in capsys.readouterr().err and not (tmp_path / "out").exists()
    metrics.write_text('{"epoch": 0, "phase": "eval", "eval/ocr_mean": 0.5}\n{"ep')
    (tmp_path / "config.yaml").write_text(options_to_yaml(RunOptions()))
    assert main([str(tmp_path)]) == 0
    assert "ocr" in (tmp_path / "report.html").read_text()
