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
    measure,
)

SCORES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
ROWS = st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=40)


@given(ROWS)
def test_auc_and_calibration_error_against_plain_loops(rows):
    scores, labels = map(np.array, zip(*rows))
    positive = scores[labels]
    negative = scores[~labels]
    expected = None
    if len(positive) and len(negative):
        differences = np.subtract.outer(positive, negative)
        ordered = np.mean((differences > 0) + 0.5 * (differences == 0))
        expected = pytest.approx(ordered, abs=1e-12)
    assert auc(scores, labels) == expected
    bins = np.minimum((scores * 10).astype(int), 9)
    error = 0.0
    for number in set(bins):
        inside = bins == number
        error += abs(scores[inside].mean() - labels[inside].mean()) * inside.mean()
    assert expected_calibration_error(scores, labels) == pytest.approx(error, abs=1e-9)


def test_several_kinds_of_pairs_are_also_reported_each():
    """A score of one half is no Yes, and a pair without a score is in no accuracy."""
    labels = [True, False, False, True, True]
    verdicts = [Verdict(score) for score in (0.9, 0.8, 0.5)] + [Verdict(None, "no"), Verdict(0.6)]
    scorer = SimpleNamespace(score=lambda pairs: verdicts)
    report = measure(scorer, list(range(5)), labels, ["a", "a", "b", "b", "b"])
    assert (report["n"], report["missing"], report["accuracy"]) == (4, 1, 0.75)
    kinds = {kind: (numbers["n"], numbers["accuracy"]) for kind, numbers in report["kinds"].items()}
    assert kinds == {"a": (2, 0.5), "b": (2, 1.0)}


def test_metrics_of_evaluation_rows():
    """Of four rows with up to two answers, of which two have no score; -100 fills up."""
    table = np.array(
        [
            [[1.0, 1, 0.9, 1], [0.5, 0, 0.6, 0]],
            [[0.25, 1, 0.1, 0], [np.nan] * 4],
            [[0, 0, 0.3, np.nan], [-100] * 4],
            [[0.5, 1, np.nan, 1], [0.5, 0, np.nan, 0]],
        ]
    )
    metrics = judge_metrics(SimpleNamespace(predictions=table))
    assert metrics["accuracy"] == pytest.approx(2.75 / 6)
    assert metrics["judge_missing"] == 2
    assert metrics["first_token_accuracy"] == 0.5
    assert metrics["judge_accuracy"] == pytest.approx(2 / 3)
    assert metrics["judge_auc"] == 1.0


def test_answer_statistics():
    """Against loops over one batch; of all logits, or of the answers'.

    Rows are padded right and left, packed, and without answer.
    """
    logits = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.full((4, 6), -100)
    labels[0, 2:4] = torch.tensor([5, 1])
    labels[1, 4:6] = torch.tensor([6, 2])
    labels[2, 1:5] = torch.tensor([6, 1, -100, 5])
    statistics = answer_statistics((logits, None), labels, yes_id=5, no_id=6)
    of_answers = logits[:, :-1][find_answers(labels).mask]
    same = answer_statistics(of_answers, labels, yes_id=5, no_id=6)
    torch.testing.assert_close(same, statistics, equal_nan=True)
    expected = torch.full((4, 2, 4), torch.nan)
    answers = {(0, 0): ([2, 3], 1.0), (1, 0): ([4, 5], 0.0), (2, 1): ([1, 2], 0.0)}
    answers[2, 0] = ([4], 1.0)
    for (row, place), (positions, label) in answers.items():
        right = []
        for position in positions:
            right.append(float(logits[row, position - 1].argmax() == labels[row, position]))
        yes, no = logits[row, positions[0] - 1, [5, 6]].exp().tolist()
        columns = AnswerStatistics(np.mean(right), right[0], yes / (yes + no), label)
        expected[row, place] = torch.tensor(columns)
    torch.testing.assert_close(statistics, expected, equal_nan=True)
    assert answer_statistics(of_answers[:0], labels[3:], yes_id=5, no_id=6).isnan().all()
