"""ConsistencyRank: metrics against loops, questions, broken items, tables."""

import hashlib
import json
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
    pairs = list(combinations(range(len(first)), 2))
    a, b = (
        np.array([np.sign(values[i] - values[j]) for i, j in pairs]) for values in (first, second)
    )
    return (a * b).sum() / np.sqrt((a != 0).sum() * (b != 0).sum())


def rho(first, second):
    """Spearman's rho: the correlation of ranks, of equal values their mean."""
    ranks = [
        [sum(v < x for v in values) + sum(v == x for v in values) / 2 for x in values]
        for values in (first, second)
    ]
    return np.corrcoef(*ranks)[0, 1]


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.55, 0.9, 0.99, 1.0]), min_size=2, max_size=7),
    st.randoms(),
)
def test_metrics_of_random_rankings(scores, random):
    n = len(scores)
    order = random.sample(range(n), n)
    found = rank_metrics(scores, order)
    rank_of = {candidate: position for position, candidate in enumerate(order)}
    predicted = sorted(
        range(n), key=lambda i: -scores[i]
    )  # sorted() is stable: ties in listed order
    assert predicted_order(scores) == predicted
    assert found["accuracy"] == pytest.approx(sum(predicted[k] == order[k] for k in range(n)) / n)
    assert found["footrule"] == sum(abs(predicted.index(c) - rank_of[c]) for c in range(n))
    assert found["top1"] == (predicted[0] == order[0]) and found["bottom1"] == (
        predicted[-1] == order[-1]
    )
    assert found["top_bottom_mean"] == (found["top1"] + found["bottom1"]) / 2
    assert found["ties"] == sum(a == b for a, b in combinations(scores, 2))
    if len(set(scores)) == 1:
        assert found["kendalltau"] == found["spearmanr"] == 0
    else:
        goodness = [-rank_of[c] for c in range(n)]
        assert found["kendalltau"] == pytest.approx(tau_b(scores, goodness), abs=1e-9)
        assert found["spearmanr"] == pytest.approx(rho(scores, goodness), abs=1e-9)
    published = sorted(range(n), key=lambda i: (-scores[i], -i))  # of a tie, the later one first
    assert found["kendalltau_published"] == pytest.approx(tau_b(published, order), abs=1e-9)
    assert found["spearmanr_published"] == pytest.approx(rho(published, order), abs=1e-9)


def test_a_tie_is_broken_as_in_the_papers_script():
    metrics = rank_metrics([1.0, 1.0, 0.0], [1, 0, 2])
    assert metrics["kendalltau_published"] == 1
    assert metrics["accuracy"] == pytest.approx(1 / 3)  # ours: ties in listed order


def test_broken_items_are_reported_and_the_run_continues(rank, capsys):
    (rank.data / "images" / "0001" / "c1.png").write_bytes(b"no picture")
    (rank.data / "images" / "0004" / "ref.png").rename(
        rank.data / "ref.png"
    )  # may also be in the benchmark's folder
    ranks = rank.data / "consistency_full_rank.jsonl"
    whole, one = ranks.read_text(), {"rank_images": ["c0.png"]}
    edit_lines(
        ranks, {2: lambda row: row | {"comp_images": ["c0.png"]} | one, 3: lambda row: row | one}
    )
    assert rank(BrightnessJudge()) == 1
    reported = capsys.readouterr().err
    assert all(f"item {n} 000{n} ref.png: " in reported for n in (1, 2, 3))
    assert [row["folder"] for row in rank.rows] == ["0000", "0004"]
    ranks.write_text(whole)
    assert rank(BrightnessJudge()) == 1
    assert [row["folder"] for row in rank.rows] == ["0000", "0004", "0002", "0003"]


def test_criteria_are_averaged_within_and_over_dimensions(rank, capsys):
    class ByQuestion(BrightnessJudge):
        def score(self, pair):
            values = {"colours": 0.8, "shape": 0.2, "size": 0.4}
            return next(value for word, value in values.items() if word in pair.question)

    edit_lines(
        rank.data / "prompt_data.jsonl",
        {3: lambda row: {**row, "idx": 33}, 4: lambda row: {"idx": "0004"}},
    )
    judge = ByQuestion()
    assert rank(judge, "--prompt_template", "1") == 1
    assert len(judge.questions) == 3 * 3 * 3
    rows = [
        json.loads(line) for line in rank.file.with_name("judge-v1.jsonl").read_text().splitlines()
    ]
    assert [row["folder"] for row in rows] == ["0000", "0001", "0002"]
    assert (
        rows[0]["scores"] == pytest.approx([(0.8 + 0.3) / 2] * 3)
        and rows[0]["metrics"]["ties"] == 3
    )
    reported = capsys.readouterr().err
    assert "item 3 0003 " in reported and "item 4 0004 " in reported


def test_what_a_run_asks_and_in_which_form_is_recorded(rank, tmp_path, capsys):
    theme, file = BrightnessJudge(), tmp_path / "mine.txt"
    prompt = "A 1x2 grid layout of one cat. [LEFT]: a. [RIGHT]: b."
    changes = dict.fromkeys(range(4), lambda row: {**row, "prompt": prompt}) | {
        4: lambda row: {"idx": 4}
    }
    edit_lines(rank.data / "prompt_data.jsonl", changes)
    assert rank(theme, "--question", "theme") == 1  # item 0004 has neither prompt nor criteria
    file.write_text("{theme} {criterion}")
    judge = BrightnessJudge()
    assert (
        rank(judge, "--question", file, "--image_labels", "<{n}>", "--answer_tokens", "variants")
        == 1
    )
    asked = {f"A 1x2 grid layout of one cat. Same {end}" for end in ("colours.", "shape.", "size?")}
    assert (
        set(theme.questions) == {theme_question("A 1x2 grid layout of one cat.")}
        and set(judge.questions) == asked
    )
    rank.file = rank.file.with_name("judge-vmine.jsonl")
    form = {"image_labels": "<{n}>", "image_format": "png", "answer_tokens": "variants"}
    digest = hashlib.sha256(b"{theme} {criterion}").hexdigest()
    recorded = {
        "questions": [{"name": "mine", "template": "{theme} {criterion}", "sha256": digest}],
        **form,
    }
    assert [row["asked"] for row in rank.rows] == [recorded] * 4
    assert rank(judge, "--question", file) == 2 and "mine.jsonl line 1" in capsys.readouterr().err


def test_images_are_unpacked_once(rank, capsys):
    images, archive = rank.data / "images", rank.data / "images.zip"
    with ZipFile(archive, "w") as packed:
        for file in images.rglob("*.png"):
            packed.write(file, file.relative_to(rank.data))
        packed.writestr("../../evil.png", b"")  # a hostile name
    shutil.rmtree(images)
    assert rank(BrightnessJudge()) == 0 and len(list(images.glob("*/*.png"))) == 20
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
        reference, *candidates = (brightness(picture(100 * number + seed)) for seed in range(4))
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
    assert r"$\pm$" in output.read_text() and r"\toprule" in output.read_text()
