"""A run directory as the trainer writes it, with made-up numbers and pictures; for the report's tests only."""

import json
from pathlib import Path

import numpy as np
import yaml
from PIL import Image, ImageDraw

NAMES = (
    "consistency_score",
    "oracle_consistency",
    "oracle_alignment",
    "oracle_view",
    "oracle_valid",
    "oracle_distinct",
)
COLOURS = ("#dc1f1f", "#1f40dc", "#199438", "#9e29bd", "#f2c70d")


def _grid(rng: np.random.Generator, consistent: bool, side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    pen, half = ImageDraw.Draw(image), side // 2
    colours = [str(rng.choice(COLOURS))] * 4 if consistent else rng.choice(COLOURS, 4).tolist()
    for i, colour in enumerate(colours):
        x, y = i % 2 * half + half // 2, i // 2 * half + half // 2
        r = int(half * rng.uniform(0.2, 0.35))
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    return image


def fake_run(folder: Path, epochs: int = 30, images: int = 16, side: int = 128) -> Path:
    """Write metrics.jsonl, config.yaml and evaluations at epochs 0, half and the end."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "seed": 3,
        "pretrained": {"model": "toy/flux"},
        "train": {"resolution": 64, "loss_type": "ppo"},
        "test": {"resolution": side},
        "sample": {"num_images_per_prompt": 16, "unique_sample_num_per_epoch": 4},
    }
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
            _evaluation(folder / "eval" / f"epoch_{epoch:04d}", images, side, consistent=epoch == epochs, means=means)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _evaluation(folder: Path, images: int, side: int, consistent: bool, means: dict[str, float]) -> None:
    folder.mkdir(parents=True)
    rows = []
    for i in range(images):
        name = f"{i:05d}.png"
        _grid(np.random.default_rng(i), consistent, side).save(folder / name)
        rows.append({"file": name, "prompt": f"2x2 grid layout of <one> shape number {i}. [TOP]-[LEFT]: big centre", "item_id": i,
                     "seed": i, "idx": f"test-{i:04d}", "category": ("training character", "held-out character")[i % 2],
                     "rewards": {n: (None if i == 3 and n == "consistency_score" else v) for n, v in means.items()}})  # fmt: skip
    (folder / "eval_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
