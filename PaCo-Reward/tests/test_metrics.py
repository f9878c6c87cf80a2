"""Accuracy, AUC and calibration against plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paco_judge.verdict import Verdict
from paco_reward.loss import find_answers
from paco_reward.metrics import (
    AnswerStatistics,
    answer_statistics,
    auc,
    expected_calibration_error,
    judge_metrics,
    judge_report,
    measure,
)

SCORES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
ROWS = st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=40)


@given(ROWS)
def test_auc_counts_ordered_pairs(rows):
    scores, labels = zip(*rows)
    positive = [score for score, label in rows if label]
    negative = [score for score, label in rows if not label]
    if not positive or not negative:
        assert auc(scores, labels) is None
        return
    differences = np.subtract.outer(positive, negative)
    expected = np.mean((differences > 0) + 0.5 * (differences == 0))
    assert auc(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_several_kinds_of_pairs_are_also_reported_each():
    scores = [0.9, 0.8, 0.3, None, 0.6]
    labels = [True, False, False, True, True]
    kinds = ["a", "a", "b", "b", "b"]
    verdicts = [Verdict(score, "none" if score is None else None) for score in scores]
    scorer = SimpleNamespace(score=lambda pairs: verdicts)
    report = measure(scorer, list(range(5)), labels, kinds)
    assert (report["n"], report["missing"], report["accuracy"]) == (4, 1, 0.75)
    for kind, n, accuracy in (("a", 2, 0.5), ("b", 2, 1.0)):
        assert report["kinds"][kind]["n"] == n
        assert report["kinds"][kind]["accuracy"] == accuracy
    assert "kinds" not in measure(scorer, list(range(5)), labels, ["a"] * 5)


@given(ROWS)
def test_calibration_error_by_bins(rows):
    scores, labels = map(np.array, zip(*rows))
    bins = np.minimum((scores * 10).astype(int), 9)
    expected = 0.0
    for number in range(10):
        inside = bins == number
        if inside.any():
            gap = abs(scores[inside].mean() - labels[inside].mean())
            expected += gap * inside.mean()
    assert expected_calibration_error(scores, labels) == pytest.approx(expected, abs=1e-9)


def test_accuracy_and_missing_scores():
    assert judge_report([0.9, 0.5, 0.2], [True, True, False])["accuracy"] == pytest.approx(2 / 3)
    assert judge_report([np.nan], [True]) == {"accuracy": None, "auc": None, "ece": None, "n": 0}


def test_metrics_of_evaluation_rows():
    table = np.array(
        [[1.0, 1, 0.9, 1], [0.5, 0, 0.6, 0], [0.25, 1, 0.1, 0], [np.nan] * 4, [0, 0, 0.3, np.nan]]
    )
    metrics = judge_metrics(SimpleNamespace(predictions=table))
    assert metrics["accuracy"] == pytest.approx(1.75 / 4)
    assert metrics["first_token_accuracy"] == 0.5
    assert metrics["judge_accuracy"] == pytest.approx(2 / 3)
    assert metrics["judge_auc"] == 1.0


def test_answer_statistics():
    """Against loops over one batch, left and right padded; of all logits, or of the answers'."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 8, generator=generator)
    labels = torch.tensor(
        [[-100, -100, 5, 1, -100, -100], [-100, -100, -100, -100, 6, 2], [-100] * 6]
    )
    statistics = answer_statistics((logits, None), labels, yes_id=5, no_id=6)
    of_answers = logits[:, :-1][find_answers(labels).mask]
    same = answer_statistics(of_answers, labels, yes_id=5, no_id=6)
    assert torch.equal(same.nan_to_num(9), statistics.nan_to_num(9))
    assert answer_statistics(of_answers[:0], labels[2:], yes_id=5, no_id=6).isnan().all()
    for row, start, label in ((0, 2, 1.0), (1, 4, 0.0)):
        guesses = logits[row].argmax(-1)
        right = [float(guesses[t - 1] == labels[row, t]) for t in (start, start + 1)]
        yes, no = logits[row, start - 1, [5, 6]].exp()
        columns = AnswerStatistics(*statistics[row])
        assert columns.token_accuracy == sum(right) / 2
        assert columns.first_token_correct == right[0]
        torch.testing.assert_close(columns.p_yes, yes / (yes + no))
        assert columns.is_yes == label
    assert statistics[2].isnan().all()


def test_answer_statistics_of_packed_rows_describe_the_first_answer():
    labels = torch.tensor([[-100, 6, 1, -100, 5, -100]])
    logits = torch.zeros(1, 6, 8)
    logits[0, 0, 6] = 2.0  # the first answer's first token: right
    (row,) = answer_statistics(logits, labels, yes_id=5, no_id=6)
    columns = AnswerStatistics(*row)
    assert columns.token_accuracy == pytest.approx(1 / 3)
    assert columns.first_token_correct == 1
    assert columns.is_yes == 0
    assert columns.p_yes == pytest.approx(1 / (1 + np.exp(2)))
