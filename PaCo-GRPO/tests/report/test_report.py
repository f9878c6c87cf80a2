"""A run directory becomes one page: self-contained, complete, in order, and clear about what is missing."""

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from paco_grpo.report.__main__ import main
from paco_grpo.report.build import write_report
from paco_grpo.report.data import Picture, ReportError, curves, read_json_lines, read_run
from paco_grpo.report.page import choose_pairs

_spec = importlib.util.spec_from_file_location("fake_run", Path(__file__).with_name("fake_run.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
fake_run = _module.fake_run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, files) of one whole report."""
    folder = tmp_path_factory.mktemp("report")
    run = fake_run(folder / "runs" / "toy_t2is")
    for name, accuracy, auc in (("base", 0.49, 0.5), ("lora", 0.97, 0.995)):
        (folder / f"judge_{name}.json").write_text(json.dumps({"accuracy": accuracy, "auc": auc, "n": 600}))
    (folder / "seconds.json").write_text(json.dumps({"world": 12.0, "judge": 310.0, "rl": 480.0}))
    files = write_report(run, folder / "out" / "report.html", judge=[folder / "judge_base.json", folder / "judge_lora.json"],
                         stage_seconds=folder / "seconds.json", title="A <title> & more")  # fmt: skip
    return folder, files


class Links(HTMLParser):
    """Everything a page would load, and its open tags."""

    VOID = ("meta", "img", "br", "link", "input", "hr")

    def __init__(self):
        super().__init__()
        self.found, self.open, self.unbalanced = [], [], []

    def handle_starttag(self, tag, attrs):
        self.found += [(tag, k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found += [(tag, k, v) for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


def test_page_is_self_contained_and_well_formed(written):
    page = written[1][0].read_text()
    links = Links()
    links.feed(page)
    assert {(t, k) for t, k, v in links.found if not v.startswith(("data:", "#"))} == set()
    assert links.open == [] and links.unbalanced == []
    assert "<script" not in page and "@import" not in page and "url(http" not in page
    assert len(page) < 3_000_000


def test_ids_are_unique_and_references_resolve(written):
    page = written[1][0].read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_everything_the_page_promises_is_there(written):
    _, files = written
    page = files[0].read_text()
    assert "A &lt;title&gt; &amp; more" in page and "&lt;one&gt; shape" in page
    assert "0.49 → 0.97" in page and "trained at 64 px, evaluated at 128 px" in page and "seed 3" in page
    for heading in ("Before and after", "Curves", "All evaluated measures", "Judge and time", "Health of the run"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<article>") == 12 and page.count("<img") == 24
    assert "held-out character" in page
    names = {path.name for path in files[1:]}
    assert names == {
        f"report_{n}.png" for n in ("curves", "images", "judge", "stages", "time", "diagnostics", "before_after")
    }
    for path in files[1:]:
        with Image.open(path) as image:
            assert image.format == "PNG" and min(image.size) > 200


def test_colours_of_figures_follow_the_page(written):
    """Light and dark: no colour of a figure is fixed inside the page, and each variable has both."""
    page = written[1][0].read_text()
    body = page[page.index("<body>") :]
    assert not re.search(r"(fill|stroke): #(?!ffffff)[0-9a-f]{6}", body)
    light, dark = page.split("prefers-color-scheme: dark")
    for variable in set(re.findall(r"var\((--[a-z0-9-]+)\)", body)):
        assert f"{variable}:" in light and f"{variable}:" in dark


def test_numbers_are_those_of_the_run(written):
    run = read_run(written[0] / "runs" / "toy_t2is")
    assert run.epochs == 30 and run.resolutions == (64, 128)
    oracle = run.test["oracle_consistency"]
    assert oracle.epoch == (0, 15, 30) and oracle.error == (0.03,) * 3
    assert run.train["consistency_score"].error == pytest.approx((0.32 / 8,) * 30)  # 64 images an epoch
    assert oracle.minutes == pytest.approx((0, 3, 6))
    assert run.seconds == pytest.approx({"sampling": 210, "waiting for rewards": 36, "training": 102, "evaluation": 60})
    assert len(run.pairs) == 16
    assert all(a.file.parent.name == "epoch_0000" and b.file.parent.name == "epoch_0030" for a, b in run.pairs)
    assert "missing_share" not in run.train  # reward/missing_share is no reward


def test_pairs_are_chosen_by_place_not_by_score():
    def pair(name, category, score):
        return (Picture(Path(name), name, category, {"r": score}),) * 2

    pairs = [pair("a0", "a", 0.1), pair("a1", "a", 0.9), pair("b0", "b", 0.0), pair("b1", "b", 1.0)]
    assert [p[0].prompt for p in choose_pairs(pairs, 3)] == ["a0", "b0", "a1"]
    assert choose_pairs([], 3) == []


def test_curve_without_errors_everywhere_has_none():
    rows = [
        {"epoch": 0, "time": 60.0, "eval/x_mean": 1.0, "eval/x_stderr": 0.1},
        {"epoch": 1, "time": 120.0, "eval/x_mean": 2.0},
    ]
    curve = curves(rows, "eval/")["x"]
    assert curve.error is None and curve.value == (1.0, 2.0) and curve.minutes == (1.0, 2.0)


def test_a_run_that_has_only_begun(tmp_path):
    """One evaluation, no epoch, no pictures: a page all the same."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        json.dumps({"epoch": 0, "step": 0, "time": 1.0, "phase": "eval", "eval/ocr_mean": 0.5}) + '\n{"ep'
    )
    files = write_report(run, tmp_path / "report.html")
    page = files[0].read_text()
    assert "No two evaluations with saved images yet" in page and "ocr" in page


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "run directory"),
        ("", "no epoch and no evaluation"),
        ("not json\n{}\n", "line 1 is not JSON"),
    ],
)
def test_bad_run_directories_are_one_clear_message(tmp_path, capsys, content, words):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "out" / "r.html")]) == 1
    error = capsys.readouterr().err
    assert words in error and "metrics.jsonl" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_bad_judge_file_is_named(tmp_path, capsys):
    run = fake_run(tmp_path / "run", epochs=2, images=2)
    assert main([str(run), "--judge", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err


def test_without_matplotlib_the_remedy_is_named(tmp_path, capsys, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("paco_grpo.report.") and not n.endswith("__main__")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # `None` in sys.modules raises ModuleNotFoundError with the name, as an absent package does
    assert main([str(tmp_path)]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_last_row_may_be_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epo')
    assert read_json_lines(path) == [{"epoch": 1}]
    path.write_text('{"epo\n{"epoch": 1}\n')
    with pytest.raises(ReportError, match="line 1"):
        read_json_lines(path)
