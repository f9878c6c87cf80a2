"""ConsistencyRank: metrics against loops, questions, broken items, tables."""

import hashlib
import shutil
from itertools import combinations
from zipfile import ZipFile

import numpy as np
import pytest
from bench_tools import BrightnessJudge, brightness, edit_lines
from hypothesis import given
from hypothesis import strategies as st
from tiny_judge import picture

from paco_eval import rank_table
from paco_eval.rank import METRICS, predicted_order, rank_metrics
from paco_judge.questions import theme_question


def tau_b(first, second):
    """Kendall's tau-b by counting pairs."""
    a = np.array([np.sign(x - y) for x, y in combinations(first, 2)])
    b = np.array([np.sign(x - y) for x, y in combinations(second, 2)])
    return (a * b).sum() / np.sqrt((a != 0).sum() * (b != 0).sum())


def rho(first, second):
    """Spearman's rho: the correlation of ranks, of equal values their mean."""
    return np.corrcoef(mean_ranks(first), mean_ranks(second))[0, 1]


def mean_ranks(values):
    values = np.array(values)
    return [(values < x).sum() + (values == x).sum() / 2 for x in values]


SCORES = st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 0.99, 1.0])


@given(st.lists(SCORES, min_size=2, max_size=7), st.randoms())
def test_metrics_of_random_rankings(scores, random):
    n = len(scores)
    order = random.sample(range(n), n)
    metrics = rank_metrics(scores, order)
    # sorted() is stable: ties in listed order.
    predicted = sorted(range(n), key=lambda i: -scores[i])
    assert predicted_order(scores) == predicted
    hits = np.equal(predicted, order)
    assert metrics["accuracy"] == pytest.approx(hits.mean())
    assert metrics["top1"] == hits[0]
    assert metrics["bottom1"] == hits[-1]
    assert metrics["top_bottom_mean"] == (metrics["top1"] + metrics["bottom1"]) / 2
    assert metrics["footrule"] == np.abs(np.argsort(predicted) - np.argsort(order)).sum()
    assert metrics["ties"] == sum(a == b for a, b in combinations(scores, 2))
    if len(set(scores)) == 1:
        assert metrics["kendalltau"] == metrics["spearmanr"] == 0
    else:
        goodness = -np.argsort(order)
        assert metrics["kendalltau"] == pytest.approx(tau_b(scores, goodness), abs=1e-9)
        assert metrics["spearmanr"] == pytest.approx(rho(scores, goodness), abs=1e-9)
    published = sorted(range(n), key=lambda i: (-scores[i], -i))  # of a tie, the later one first
    assert metrics["kendalltau_published"] == pytest.approx(tau_b(published, order), abs=1e-9)
    assert metrics["spearmanr_published"] == pytest.approx(rho(published, order), abs=1e-9)


def test_a_tie_is_broken_as_in_the_papers_script():
    metrics = rank_metrics([1.0, 1.0, 0.0], [1, 0, 2])
    assert metrics["kendalltau_published"] == 1
    assert metrics["accuracy"] == pytest.approx(1 / 3)  # ours: ties in listed order


def test_broken_items_are_reported_and_the_run_continues(rank, capsys):
    images = rank.data / "images"
    (images / "0001" / "c1.png").write_bytes(b"no picture")
    # A reference may also be in the benchmark's folder.
    (images / "0004" / "ref.png").rename(rank.data / "ref.png")
    ranks = rank.data / "consistency_full_rank.jsonl"
    whole = ranks.read_text()
    only_c0 = {"rank_images": ["c0.png"]}
    changes = {
        2: lambda row: row | {"comp_images": ["c0.png"]} | only_c0,
        3: lambda row: row | only_c0,
    }
    edit_lines(ranks, changes)
    assert rank(BrightnessJudge()) == 1
    reported = capsys.readouterr().err
    for number in (1, 2, 3):
        assert f"item {number} 000{number} ref.png: " in reported
    assert [row["folder"] for row in rank.rows] == ["0000", "0004"]
    ranks.write_text(whole)
    assert rank(BrightnessJudge()) == 1
    assert [row["folder"] for row in rank.rows] == ["0000", "0004", "0002", "0003"]


def test_criteria_are_averaged_within_and_over_dimensions(rank, capsys):
    class ByQuestion(BrightnessJudge):
        def score(self, pair):
            values = {"colours": 0.8, "shape": 0.2, "size": 0.4}
            return next(value for word, value in values.items() if word in pair.question)

    changes = {3: lambda row: row | {"idx": 33}, 4: lambda row: {"idx": "0004"}}
    edit_lines(rank.data / "prompt_data.jsonl", changes)
    judge = ByQuestion()
    assert rank(judge, "--prompt_template", "1") == 1
    assert len(judge.questions) == 3 * 3 * 3
    rank.file = rank.file.with_name("judge-v1.jsonl")
    assert [row["folder"] for row in rank.rows] == ["0000", "0001", "0002"]
    first = rank.rows[0]
    assert first["scores"] == pytest.approx([(0.8 + 0.3) / 2] * 3)
    assert first["metrics"]["ties"] == 3
    reported = capsys.readouterr().err
    assert "item 3 0003 " in reported
    assert "item 4 0004 " in reported


def test_what_a_run_asks_and_in_which_form_is_recorded(rank, tmp_path, capsys):
    cat = "A 1x2 grid layout of one cat."
    prompt = {"prompt": f"{cat} [LEFT]: a. [RIGHT]: b."}
    changes = dict.fromkeys(range(4), lambda row: row | prompt)
    changes[4] = lambda row: {"idx": 4}  # neither a prompt nor criteria
    edit_lines(rank.data / "prompt_data.jsonl", changes)
    judge = BrightnessJudge()
    assert rank(judge, "--question", "theme") == 1
    assert set(judge.questions) == {theme_question(cat)}

    template = "{theme} {criterion}"
    file = tmp_path / "mine.txt"
    file.write_text(template)
    judge = BrightnessJudge()
    form = ["--image_labels", "<{n}>", "--answer_tokens", "variants"]
    assert rank(judge, "--question", file, *form) == 1
    assert set(judge.questions) == {
        f"{cat} Same colours.",
        f"{cat} Same shape.",
        f"{cat} Same size?",
    }
    rank.file = rank.file.with_name("judge-vmine.jsonl")
    digest = hashlib.sha256(template.encode()).hexdigest()
    recorded = {
        "questions": [{"name": "mine", "template": template, "sha256": digest}],
        "image_labels": "<{n}>",
        "image_format": "png",
        "answer_tokens": "variants",
    }
    assert [row["asked"] for row in rank.rows] == [recorded] * 4
    assert rank(judge, "--question", file) == 2
    assert "mine.jsonl line 1" in capsys.readouterr().err


def test_images_are_unpacked_once(rank, capsys):
    images = rank.data / "images"
    archive = rank.data / "images.zip"
    with ZipFile(archive, "w") as packed:
        for file in images.rglob("*.png"):
            packed.write(file, file.relative_to(rank.data))
        packed.writestr("../../evil.png", b"")  # a hostile name
    shutil.rmtree(images)
    assert rank(BrightnessJudge()) == 0
    assert len(list(images.glob("*/*.png"))) == 20
    assert all(rank.data in file.parents for file in rank.out.rglob("evil.png"))
    archive.write_bytes(b"no archive")
    assert rank(BrightnessJudge()) == 0  # unpacked already
    shutil.rmtree(images)
    assert rank(BrightnessJudge()) == 2
    assert str(archive) in capsys.readouterr().err


def test_rows_and_tables(rank, tmp_path):
    assert rank(BrightnessJudge()) == 0
    assert [row["folder"] for row in rank.rows] == [f"{i:04d}" for i in range(5)]
    for number, row in enumerate(rank.rows):
        shades = [brightness(picture(100 * number + seed)) for seed in range(4)]
        reference, *candidates = shades
        scores = [1 - abs(reference - candidate) for candidate in candidates]
        assert row["scores"] == pytest.approx(scores)
        # The benchmark ranks c0, c1 and c2 as the item's number says.
        order = [(number + place) % 3 for place in range(3)]
        best_first = sorted(range(3), key=lambda candidate: -scores[candidate])
        goodness = [-order.index(candidate) for candidate in range(3)]
        hits = sum(a == b for a, b in zip(best_first, order, strict=True))
        assert row["metrics"]["accuracy"] == pytest.approx(hits / 3)
        assert row["metrics"]["kendalltau"] == pytest.approx(tau_b(scores, goodness))
        assert row["metrics"]["spearmanr"] == pytest.approx(rho(scores, goodness))
        assert row["metrics"]["top1"] == (best_first[0] == order[0])
    output = tmp_path / "summary.txt"
    base = ["--results_dir", str(tmp_path / "results"), "--output_file", str(output), "--print_std"]
    assert rank_table.main(base) == 0
    text = output.read_text()
    for metric in METRICS:
        values = [row["metrics"][metric] for row in rank.rows]
        assert f"{np.mean(values):.4f} ± {np.std(values):.4f}" in text
    assert text.splitlines()[1].split()[:2] == ["judge-v3", "5"]
    assert rank_table.main([*base, "--output_format", "latex"]) == 0
    assert r"$\pm$" in output.read_text()
    assert r"\toprule" in output.read_text()
