"""A run directory becomes one page: self-contained, complete, and clear about what is missing."""

import json
import re
from pathlib import Path

import yaml
from PIL import Image

from paco_grpo.report import Name, Page, main, read_run, write_report

NAMES = ("consistency_score", "oracle_consistency")
CONFIG = {
    "seed": 3,
    "num_epochs": 10,
    "pretrained": {"model": "toy/flux"},
    "train": {
        "resolution": 64,
        "loss_type": "ppo",
        "reward_fn": {"consistency_score": 1.0, "between_images": 8.0, "a.b:monitored": 0.0},
    },
    "test": {"resolution": 128},
    "sample": {"num_images_per_prompt": 16, "unique_sample_num_per_epoch": 4},
}
TRAINED = {
    "reward/consistency_score_mean": 0.45,
    "reward/consistency_score_std": 0.32,
    "train/grad_norm": 0.3,
    "reward/within_minus_between": 0.4,
    "time/sample_s": 7.0,
    "time/reward_wait_s": 1.2,
    "time/train_s": 3.4,
}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_evaluation(folder: Path, scores: list[dict[str, float | None]]) -> None:
    """Images of categories a, with a reference, and b in turn."""
    (folder / "references").mkdir(parents=True)
    rows = []
    for i, rewards in enumerate(scores):
        name = f"{i:05d}.png"
        Image.new("RGB", (128, 128), (10 * i, 80, 120)).save(folder / name)
        prompt = f"<one> shape number {i}"
        rows.append({"file": name, "prompt": prompt, "category": "ab"[i % 2], "rewards": rewards})
        if i % 2 == 0:
            rows[-1]["reference"] = f"references/{name}"
            Image.new("RGB", (8, 8)).save(folder / rows[-1]["reference"])
    write_rows(folder / "eval_data.jsonl", rows)


def fake_run(folder: Path, epochs: int, images: int) -> Path:
    """metrics.jsonl, config.yaml and evaluations at epochs 0, half and the end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    rows = [{"phase": "train", "epoch": epoch} | TRAINED for epoch in range(1, epochs + 1)]
    for epoch in (0, epochs // 2, epochs):
        score = 0.42 + epoch / 100
        row = {"phase": "eval", "epoch": epoch, "time/eval_s": 20.0}
        for name in NAMES:
            row |= {f"eval/{name}_mean": score, f"eval/{name}_stderr": 0.03}
        rows.append(row)
        of_images = [dict.fromkeys(NAMES, score) for _ in range(images)]
        write_evaluation(folder / "eval" / f"epoch_{epoch:04d}", of_images)
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def test_a_whole_page(tmp_path):
    folder = fake_run(tmp_path / "runs" / "toy_t2is", epochs=4, images=24)
    out = tmp_path / "out" / "report.html"
    card = {"label": "The judge", "meaning": "A table.", "head": ["", "n"], "rows": [["x", 7]]}
    page = Page(
        title="A <title> & more",
        introduction="The oracle is a program.",
        names={"oracle_consistency": Name("oracle: same", "Read from pixels.")},
        evidence=[card],
        seconds={"world": 12.0, "judge": 312.0},
    )
    write_report(read_run(folder), out, page)
    text = out.read_text()
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"}
    assert len(text) < 3_000_000
    assert text == text.strip() + "\n"
    for part in (
        "A &lt;title&gt; &amp; more",
        "&lt;one&gt; shape",
        "judge: images differ (weight 8)",
        "stopped after 4 of 10 epochs",
        "5.4 minutes (world 0.2, judge 5.2)",
        "<td>7</td>",
        "<td>0.420 ± 0.030</td>",
        "oracle: same 0.42 → 0.46",
    ):
        assert part in text
    assert text.count("<figure>") == 2 * 6 + 3
    for category in "ab":
        assert text.count(f'<p class="faint">{category}</p>') == 3
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_a_run_that_has_only_begun(tmp_path):
    metrics = '{"epoch": 0, "phase": "eval", "eval/ocr_mean": 0.5}\n{"ep'
    (tmp_path / "metrics.jsonl").write_text(metrics)
    write_report(read_run(tmp_path), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "ocr" in text
    assert ' settings">0 epochs</p>' in text  # of what is not known, nothing


def test_the_program(tmp_path, capsys):
    run = fake_run(tmp_path / "run", epochs=2, images=2)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    (run / "metrics.jsonl").write_text("")
    assert main([str(run), "--out", str(tmp_path / "out" / "r.html")]) == 1
    assert str(run) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
