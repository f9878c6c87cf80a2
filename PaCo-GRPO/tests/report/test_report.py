"""A run directory becomes one page: self-contained, complete, and clear about what is missing."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from paco_grpo.report import choose_pairs, main, read_run, write_report

NAMES = ("consistency_score", "oracle_consistency", "oracle_alignment")


def fake_run(folder: Path, epochs: int = 30, images: int = 16) -> Path:
    """metrics.jsonl, config.yaml and evaluations at epochs 0, half and the end."""
    folder.mkdir(parents=True)
    config = {"seed": 3, "pretrained": {"model": "toy/flux"}, "train": {"resolution": 64, "loss_type": "ppo"},
              "test": {"resolution": 128}, "sample": {"num_images_per_prompt": 16, "unique_sample_num_per_epoch": 4}}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for epoch in range(epochs + 1):
        gain = 0.35 * (1 - np.exp(-epoch / 12))
        if epoch:
            rows.append({"phase": "train", "epoch": epoch, "reward/consistency_score_mean": 0.45 + gain, "reward/consistency_score_std": 0.32,
                         "reward/missing_share": 0.0, "train/grad_norm": 0.3, "train/kl": None, "time/sample_s": 7.0,
                         "time/reward_wait_s": 1.2, "time/train_s": 3.4})  # fmt: skip
        if epoch in (0, epochs // 2, epochs):
            means = dict(zip(NAMES, (0.42 + gain, 0.5 + gain, 0.7), strict=True))
            rows.append({"phase": "eval", "epoch": epoch, "eval/num_images": images, "time/eval_s": 20.0})
            for name, value in means.items():
                rows[-1] |= {f"eval/{name}_mean": value, f"eval/{name}_stderr": 0.03}
            place, shown = folder / "eval" / f"epoch_{epoch:04d}", []
            place.mkdir(parents=True)
            for i in range(images):
                Image.new("RGB", (128, 128), (10 * i, 80, 120)).save(place / f"{i:05d}.png")
                scores = {name: None if i == 3 and name == NAMES[0] else value for name, value in means.items()}
                shown.append(
                    {
                        "file": f"{i:05d}.png",
                        "prompt": f"<one> shape number {i}",
                        "category": "ab"[i % 2],
                        "rewards": scores,
                    }
                )
            (place / "eval_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


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


def test_a_whole_page(tmp_path):
    run = fake_run(tmp_path / "runs" / "toy_t2is")
    for name, accuracy in (("base", 0.49), ("lora", 0.97)):
        (tmp_path / f"judge_{name}.json").write_text(json.dumps({"accuracy": accuracy, "auc": 0.995, "n": 600}))
    (tmp_path / "seconds.json").write_text(json.dumps({"world": 12.0, "judge": 310.0, "rl": 480.0}))
    files = write_report(run, tmp_path / "out" / "report.html", judge=[tmp_path / "judge_base.json", tmp_path / "judge_lora.json"],
                         stage_seconds=tmp_path / "seconds.json", title="A <title> & more")  # fmt: skip
    page, tags = files[0].read_text(), Tags()
    tags.feed(page)
    assert all(link.startswith("data:") for link in tags.loaded) and tags.open == [] and len(page) < 3_000_000
    assert "A &lt;title&gt; &amp; more" in page and "&lt;one&gt; shape" in page
    for text in ("trained at 64 px, evaluated at 128 px", "seed 3", "0.970", "0.420 ± 0.030"):
        assert text in page
    headings = [part.partition("</h2>")[0] for part in page.split("<h2>")[1:]]
    assert headings == ["What changed", "By how much", "Can I trust it", "How long did it take"]
    assert page.count("<article>") == 12 and page.count("<figure>") == 24
    assert {path.name for path in files[1:]} == {f"report_{n}.png" for n in ("curves", "oracle", "health", "time")}


def test_numbers_are_those_of_the_run(tmp_path):
    run = read_run(fake_run(tmp_path / "run"))
    assert run.epochs == 30
    oracle = run.test["oracle_consistency"]
    assert oracle[:, 0].tolist() == [0, 15, 30] and oracle[:, 2].tolist() == [0.03] * 3
    assert run.train["consistency_score"][:, 2] == pytest.approx(np.full(30, 0.32 / 8))  # 64 images an epoch
    assert set(run.train) == {"consistency_score"} and set(run.health) == {"train/grad_norm"}
    assert run.seconds == pytest.approx({"sampling": 210, "waiting for rewards": 36, "training": 102, "evaluation": 60})
    assert len(run.pairs) == 16
    assert all(a["file"].parent.name == "epoch_0000" and b["file"].parent.name == "epoch_0030" for a, b in run.pairs)


def test_pairs_are_chosen_by_place_not_by_score():
    pairs = [
        ({"prompt": name, "category": name[0], "rewards": {"r": score}},) * 2
        for name, score in (("a0", 0.1), ("a1", 0.9), ("b0", 0.0), ("b1", 1.0))
    ]
    assert [pair[0]["prompt"] for pair in choose_pairs(pairs, 3)] == ["a0", "b0", "a1"]


def test_a_run_that_has_only_begun(tmp_path):
    """One evaluation, no epoch, no pictures, a line that is being written: a page all the same."""
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0, "phase": "eval", "eval/ocr_mean": 0.5}\n{"ep')
    page = write_report(tmp_path, tmp_path / "report.html")[0].read_text()
    assert "No two evaluations with saved images yet" in page and "ocr" in page


@pytest.mark.parametrize(
    "content",
    [None, "", "not json\n{}\n", '[1]\n{"phase": 1}\n', '{"phase": "train", "train/grad_norm": "high", "epoch": 1}\n'],
)
def test_a_bad_run_directory_is_one_message(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "out" / "r.html")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_judge_file_and_a_bad_picture_are_named(tmp_path, capsys):
    run = fake_run(tmp_path / "run", epochs=2, images=2)
    assert main([str(run), "--judge", str(tmp_path / "none.json")]) == 1 and "none.json" in capsys.readouterr().err
    picture = run / "eval" / "epoch_0002" / "00000.png"
    picture.write_bytes(picture.read_bytes()[:40])
    assert main([str(run)]) == 1 and str(picture) in capsys.readouterr().err
