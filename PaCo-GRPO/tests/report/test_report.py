"""A run directory becomes one page: self-contained, complete, and clear about what is missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from paco_grpo.report.__main__ import main
from paco_grpo.report.data import Picture, curves, read_run
from paco_grpo.report.page import choose_pairs, write_report

NAMES = ("consistency_score", "oracle_consistency", "oracle_alignment", "oracle_view", "oracle_valid", "oracle_distinct")


def fake_run(folder: Path, epochs: int = 30, images: int = 16, side: int = 128) -> Path:
    """Write metrics.jsonl, config.yaml and evaluations at epochs 0, half and the end."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"seed": 3, "pretrained": {"model": "toy/flux"}, "train": {"resolution": 64, "loss_type": "ppo"}, "test": {"resolution": side},
              "sample": {"num_images_per_prompt": 16, "unique_sample_num_per_epoch": 4}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for epoch in range(epochs + 1):
        clock = {"epoch": epoch, "step": epoch, "time": 14.0 * epoch + 30, "train_time": 12.0 * epoch}
        gain = 0.35 * (1 - np.exp(-epoch / 12))
        if epoch:
            row = {"phase": "train", **clock, "reward/consistency_score_mean": 0.45 + gain + rng.normal(0, 0.015),
                   "reward/consistency_score_std": 0.32, "reward/missing_share": 0.0, "train/loss": 1e-5, "train/ratio_mean": 1.0,
                   "train/clip_share": 0.02, "train/grad_norm": 0.3 + rng.random() * 0.1, "advantage/zero_std_share": 0.0,
                   "time/sample_s": 7.0, "time/reward_wait_s": 1.2, "time/train_s": 3.4, "time/epoch_s": 11.6}  # fmt: skip
            rows.append(row)
        if epoch in (0, epochs // 2, epochs):
            means = dict(zip(NAMES, (0.42 + gain, 0.5 + gain * 0.9, 0.7 + gain * 0.4, 0.93, 0.95, 0.9), strict=True))
            row = {"phase": "eval", **clock, "eval/num_images": images, "time/eval_s": 20.0}
            for name, value in means.items():
                row |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": 0.03}
            rows.append(row)
            _evaluation(folder / "eval" / f"epoch_{epoch:04d}", images, side, means)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _evaluation(folder: Path, images: int, side: int, means: dict[str, float]) -> None:
    folder.mkdir(parents=True)
    rows = []
    for i in range(images):
        name = f"{i:05d}.png"
        Image.new("RGB", (side, side), (10 * i, 80, 120)).save(folder / name)
        rows.append({"file": name, "prompt": f"2x2 grid layout of <one> shape number {i}. [TOP]-[LEFT]: big center", "item_id": i,
                     "seed": i, "idx": f"test-{i:04d}", "category": ("training character", "held-out character")[i % 2],
                     "rewards": {n: (None if i == 3 and n == "consistency_score" else v) for n, v in means.items()}})  # fmt: skip
    (folder / "eval_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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


class Tags(HTMLParser):
    """Everything a page would load, and its open tags."""

    def __init__(self):
        super().__init__()
        self.loaded, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_self_contained_and_well_formed(written):
    page = written[1][0].read_text()
    tags = Tags()
    tags.feed(page)
    assert all(link.startswith(("data:", "#")) for link in tags.loaded) and tags.open == []
    assert "<script" not in page and "@import" not in page and "url(http" not in page
    assert len(page) < 3_000_000
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_everything_the_page_promises_is_there(written):
    _, files = written
    page = files[0].read_text()
    assert "A &lt;title&gt; &amp; more" in page and "&lt;one&gt; shape" in page
    assert "trained at 64 px, evaluated at 128 px" in page and "seed 3" in page and "0.970" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["What changed", "By how much", "Can I trust it", "How long did it take"]
    assert page.count("<article>") == 12 and page.count("<figure>") == 24
    assert "held-out character" in page
    assert {path.name for path in files[1:]} == {f"report_{n}.png" for n in ("curves", "oracle", "health", "time")}
    for path in files[1:]:
        with Image.open(path) as image:
            assert image.format == "PNG" and min(image.size) > 100


def test_numbers_are_those_of_the_run(written):
    run = read_run(written[0] / "runs" / "toy_t2is")
    assert run.epochs == 30 and run.resolutions == (64, 128)
    oracle = run.test["oracle_consistency"]
    assert oracle.epoch == (0, 15, 30) and oracle.error == (0.03,) * 3
    assert run.train["consistency_score"].error == pytest.approx((0.32 / 8,) * 30)  # 64 images an epoch
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
    rows = [{"epoch": 0, "time": 60.0, "eval/x_mean": 1.0, "eval/x_stderr": 0.1}, {"epoch": 1, "time": 120.0, "eval/x_mean": 2.0}]
    curve = curves(rows, "eval/")["x"]
    assert curve.error is None and curve.value == (1.0, 2.0)


def test_a_run_that_has_only_begun(tmp_path):
    """One evaluation, no epoch, no pictures: a page all the same."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"epoch": 0, "step": 0, "time": 1.0, "phase": "eval", "eval/ocr_mean": 0.5}) + "\n{\"ep")
    files = write_report(run, tmp_path / "report.html")
    page = files[0].read_text()
    assert "No two evaluations with saved images yet" in page and "ocr" in page


@pytest.mark.parametrize(("content", "named"), [
    (None, "run directory"), ("", "metrics.jsonl"), ("not json\n{}\n", "line 1"), ("{}\n{\"phase\": 1}\n", "metrics.jsonl"),
])
def test_bad_run_directories_are_one_clear_message(tmp_path, capsys, content, named):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "out" / "r.html")]) == 1
    error = capsys.readouterr().err
    assert named in error and "metrics.jsonl" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_bad_judge_file_is_named(tmp_path, capsys):
    run = fake_run(tmp_path / "run", epochs=2, images=2)
    (tmp_path / "list.json").write_text("[]")
    for name in ("none.json", "list.json"):
        assert main([str(run), "--judge", str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err
