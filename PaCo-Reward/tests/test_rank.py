"""ConsistencyRank: metrics, questions, broken items, tables."""

import hashlib
import shutil
from itertools import combinations
from zipfile import ZipFile

import numpy as np
import pytest
from bench_tools import ContentJudge, edit_lines
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, spearmanr

from paco_eval.rank import rank_metrics
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


def test_broken_items_are_reported_and_the_run_continues(rank, capsys):
    images = rank.data / "images"
    (images / "0012" / "a1.png").write_bytes(b"no picture")
    # A reference may also be in the benchmark's folder.
    (images / "0033" / "r4.png").rename(rank.data / "r4.png")
    rankings = rank.data / "consistency_full_rank.jsonl"
    whole = rankings.read_text()
    edit_lines(rankings, {3: {"rank_images": ["a3.png"]}})
    assert rank(ContentJudge()) == 1
    reported = capsys.readouterr().err
    assert "item 1 0012 r1.png: " in reported and "item 3 0026 r3.png: " in reported
    rankings.write_text(whole)
    assert rank(ContentJudge()) == 1
    assert [row["folder"] for row in rank.rows] == ["0005", "0019", "0033", "0026"]


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


def test_what_a_run_asks_and_in_which_form_is_recorded(rank, tmp_path):
    template = "{theme} {criterion}"
    file = tmp_path / "mine.txt"
    file.write_text(template)
    form = ["--image_labels", "<{n}>", "--answer_tokens", "variants"]
    assert rank(ContentJudge(), "--question", file, *form) == 0
    rank.file = rank.file.with_name("judge-vmine.jsonl")
    digest = hashlib.sha256(template.encode()).hexdigest()
    recorded = {
        "questions": [{"name": "mine", "template": template, "sha256": digest}],
        "image_labels": "<{n}>",
        "image_format": "png",
        "answer_tokens": "variants",
    }
    assert [row["asked"] for row in rank.rows] == [recorded] * 5


def test_images_are_unpacked_once(rank):
    images = rank.data / "images"
    archive = rank.data / "images.zip"
    with ZipFile(archive, "w") as packed:
        for file in images.rglob("*.png"):
            packed.write(file, file.relative_to(rank.data))
    shutil.rmtree(images)
    assert rank(ContentJudge()) == 0
    assert len(list(images.glob("*/*.png"))) == 19
    archive.write_bytes(b"no archive")
    assert rank(ContentJudge()) == 0  # unpacked already
