"""ConsistencyRank's baselines against direct computations."""

import pytest
import torch
from PIL import Image
from tiny_pipelines import save_open_clip

from paco_eval import baselines
from paco_judge.questions import Pair


@pytest.fixture
def evaluate(rank):
    """``eval.py`` on ``bench``: ``evaluate(scorer)`` -> rows of its results file."""

    def run(scorer):
        assert rank.main("--scorer", scorer) == 0
        rank.file = rank.out / "results" / f"{scorer}.jsonl"
        return rank.rows

    return run


def pictures_of(bench, row):
    return [
        Image.open(bench / "images" / row["folder"] / name)
        for name in (row["ref_image"], *row["comp_images"])
    ]


def test_histogram_values(evaluate):
    assert len(evaluate("histogram")) == 5
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    mixed = Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    (verdict,) = baselines.make_baseline("histogram")([Pair(red, mixed, "")])
    assert verdict.p_yes == pytest.approx(0.75)


def test_clip_i_is_the_cosine_of_image_features(evaluate, bench, tmp_path, monkeypatch):
    import open_clip

    save_open_clip(tmp_path / "clip")
    monkeypatch.setattr(baselines, "CLIP", (name := f"local-dir:{tmp_path}/clip", None))
    rows = evaluate("clip_i")
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    scores = []
    for row in rows:
        assert row["model"] == "clip_i ViT-H-14 laion2b_s32b_b79k"
        images = torch.stack([preprocess(image) for image in pictures_of(bench, row)])
        with torch.no_grad():
            features = model.eval().encode_image(images, normalize=True)
        expected = (1 + features[1:] @ features[0]) / 2
        assert row["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
        scores += row["scores"]
    assert len(set(scores)) == 14
