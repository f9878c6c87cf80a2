"""ConsistencyRank: metrics, items without an answer, images, and baselines."""

import shutil
from itertools import combinations
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from bench_tools import ContentJudge
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import kendalltau, spearmanr
from tiny_judge import picture
from tiny_pipelines import save_open_clip

from paco_eval import baselines
from paco_eval.rank import rank_metrics
from paco_judge.questions import Pair
from paco_judge.verdict import Verdict

SCORES = st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 0.99, 1.0])


@given(st.lists(SCORES, min_size=2, max_size=7), st.randoms())
def test_metrics_of_random_rankings(scores, random):
    n = len(scores)
    order = random.sample(range(n), n)
    # sorted() is stable: ties in listed order.
    predicted = sorted(range(n), key=lambda i: -scores[i])
    published = sorted(range(n), key=lambda i: (-scores[i], -i))  # of a tie, the later one first
    hits = np.equal(predicted, order).astype(float)
    goodness = -np.argsort(order)
    is_constant = len(set(scores)) == 1
    assert rank_metrics(scores, order) == pytest.approx(
        {
            "accuracy": hits.mean(),
            "kendalltau": 0 if is_constant else kendalltau(scores, goodness)[0],
            "spearmanr": 0 if is_constant else spearmanr(scores, goodness)[0],
            "footrule": np.abs(np.argsort(predicted) - np.argsort(order)).sum(),
            "top1": hits[0],
            "bottom1": hits[-1],
            "top_bottom_mean": hits[[0, -1]].mean(),
            "kendalltau_published": kendalltau(published, order)[0],
            "spearmanr_published": spearmanr(published, order)[0],
            "ties": sum(a == b for a, b in combinations(scores, 2)),
        },
        abs=1e-9,
    )


@pytest.mark.parametrize(("unanswered", "item"), [(2, 0), (3, 1)])
def test_an_item_without_one_of_its_answers_has_no_row(rank, capsys, unanswered, item):
    """Item 0 has three answers, and the fourth is the first of item 1."""
    judge = ContentJudge()

    def answers(pairs):
        verdicts = judge(pairs)
        verdicts[unanswered] = Verdict(None, "silence")
        return verdicts

    assert rank(answers, "--batch_size", "99") == 1
    assert f"item {item} " in capsys.readouterr().err
    assert [row["index"] for row in rank.rows] == [n for n in range(5) if n != item]


def test_images_are_unpacked_once(rank):
    """The first of the published templates asks about the criteria."""
    images = rank.data / "images"
    archive = rank.data / "images.zip"
    with ZipFile(archive, "w") as packed:
        for file in images.rglob("*.png"):
            packed.write(file, file.relative_to(rank.data))
    shutil.rmtree(images)
    judge = ContentJudge()
    assert rank(judge, "--prompt_template", "1") == 0
    assert all("the following criteria? Same" in question for question in judge.questions)
    assert len(list(images.glob("*/*.png"))) == 19
    archive.write_bytes(b"no archive")
    assert rank(ContentJudge()) == 0  # unpacked already


def test_histogram_values(rank):
    assert rank.main("--scorer", "histogram") == 0
    rank.file = rank.file.with_name("histogram.jsonl")
    assert len(rank.rows) == 5
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    mixed = Image.new("RGB", (4, 4), (255, 0, 0))
    mixed.paste((0, 0, 255), (0, 0, 1, 4))  # a quarter is blue
    (verdict,) = baselines.make_baseline("histogram")([Pair(red, mixed, "")])
    assert verdict.p_yes == pytest.approx(0.75)


def test_clip_i_is_the_cosine_of_image_features(tmp_path, monkeypatch):
    import open_clip

    save_open_clip(tmp_path / "clip")
    name = f"local-dir:{tmp_path}/clip"
    monkeypatch.setattr(baselines, "CLIP", (name, None))
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    pictures = [picture(number) for number in range(4)]
    with torch.no_grad():
        images = torch.stack([preprocess(image) for image in pictures])
        features = model.eval().encode_image(images, normalize=True)
    expected = (1 + features[1:] @ features[0]) / 2
    assert len(set(expected.tolist())) == 3
    pairs = [Pair(pictures[0], other, "") for other in pictures[1:]]
    scores = [verdict.p_yes for verdict in baselines.make_baseline("clip_i", 3)(pairs)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
