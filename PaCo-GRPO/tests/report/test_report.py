"""A run directory becomes one page: self-contained, complete, and clear about what is missing."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from paco_grpo.report import main, read_run, write_report

NAMES = ("consistency_score", "oracle_consistency")


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fake_run(folder: Path, epochs: int, images: int) -> Path:
    """metrics.jsonl, config.yaml and evaluations at epochs 0, half and the end."""
    folder.mkdir(parents=True)
    config = {"seed": 3, "pretrained": {"model": "toy/flux"}, "train": {"resolution": 64, "loss_type": "ppo"},
              "test": {"resolution": 128}, "sample": {"num_images_per_prompt": 16, "unique_sample_num_per_epoch": 4}}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for epoch in range(epochs + 1):
        if epoch:
            rows.append({"phase": "train", "epoch": epoch, "reward/consistency_score_mean": 0.45,
                         "reward/consistency_score_std": 0.32, "train/grad_norm": 0.3, "time/sample_s": 7.0,
                         "time/reward_wait_s": 1.2, "time/train_s": 3.4})  # fmt: skip
        if epoch in (0, epochs // 2, epochs):
            place, shown = folder / "eval" / f"epoch_{epoch:04d}", []
            place.mkdir(parents=True)
            scores = {name: 0.42 + epoch / 100 for name in NAMES}
            means = {f"eval/{name}_mean": score for name, score in scores.items()}
            errors = {f"eval/{name}_stderr": 0.03 for name in NAMES}
            rows.append({"phase": "eval", "epoch": epoch, "time/eval_s": 20.0} | means | errors)
            for i in range(images):
                Image.new("RGB", (128, 128), (10 * i, 80, 120)).save(place / f"{i:05d}.png")
                row = {
                    "file": f"{i:05d}.png",
                    "prompt": f"<one> shape number {i}",
                    "category": "ab"[i % 2],
                }
                shown.append(row | {"rewards": scores | ({NAMES[0]: None} if i == 3 else {})})
            write_rows(place / "eval_data.jsonl", shown)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def test_a_whole_page(tmp_path):
    folder = fake_run(tmp_path / "runs" / "toy_t2is", epochs=4, images=24)
    (tmp_path / "judge.json").write_text('{"accuracy": 0.97, "auc": 0.995, "n": 600}')
    (tmp_path / "seconds.json").write_text('{"world": 12.0, "judge": 310.0}')
    page, *pictures = write_report(folder, tmp_path / "out" / "report.html", judge=2 * [tmp_path / "judge.json"],
                                   stage_seconds=tmp_path / "seconds.json", title="A <title> & more")  # fmt: skip
    text = page.read_text()
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"} and len(text) < 3_000_000
    for part in (
        "A &lt;title&gt; &amp; more",
        "&lt;one&gt; shape",
        "64 px",
        "128 px",
        "seed 3",
        "0.970",
        "0.420 ± 0.030",
    ):
        assert part in text
    assert text.count("<article>") == 12 and text.count("<figure>") == 24 and len(pictures) == 4
    assert (
        text.count('<span class="faint">a</span>')
        == text.count('<span class="faint">b</span>')
        == 6
    )
    run = read_run(folder)
    assert run.epochs == 4 and run.test["oracle_consistency"][:, 0].tolist() == [0, 2, 4]
    assert run.train["consistency_score"][:, 2] == pytest.approx(
        np.full(4, 0.32 / 8)
    )  # 64 images an epoch
    assert set(run.train) == {"consistency_score"} and set(run.health) == {"train/grad_norm"}
    assert run.seconds == pytest.approx(
        {"sampling": 28, "waiting for rewards": 4.8, "training": 13.6, "evaluation": 60}
    )
    assert {(a["file"].parent.name, b["file"].parent.name) for a, b in run.pairs} == {
        ("epoch_0000", "epoch_0004")
    }


def test_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 0, "phase": "eval", "eval/ocr_mean": 0.5}\n{"ep'
    )
    page = write_report(tmp_path, tmp_path / "report.html")[0].read_text()
    assert "ocr" in page and ">0 epochs</p>" in page  # of what is not known, nothing


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    run = fake_run(tmp_path / "run", epochs=2, images=2)
    assert (
        main([str(run), "--judge", str(tmp_path / "none.json")]) == 1
        and "none.json" in capsys.readouterr().err
    )
    picture = run / "eval" / "epoch_0002" / "00000.png"
    picture.write_bytes(picture.read_bytes()[:40])
    assert main([str(run)]) == 1 and str(picture) in capsys.readouterr().err
    for content in ("not json\n{}\n", ""):
        (run / "metrics.jsonl").write_text(content)
        assert main([str(run), "--out", str(tmp_path / "out" / "r.html")]) == 1
        error = capsys.readouterr().err
        assert (
            str(run) in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()
        )
