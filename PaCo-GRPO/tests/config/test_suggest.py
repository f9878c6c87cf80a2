"""Guesses for misspelt names."""

import pytest

from paco_grpo.suggest import did_you_mean

REWARDS = ["consistency_score", "consistency_for_editing", "subfig_clipT", "pickscore", "ocr", "pkg.mod:factory"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("consistency_scor", "consistency_score"),
        ("PickScore", "pickscore"),
        ("subfig_clipt", "subfig_clipT"),
        ("pkg.mod:facory", "pkg.mod:factory"),
        ("aesthetic", None),
    ],
)
def test_the_nearest_name(typed, meant):
    assert did_you_mean(typed, iter(REWARDS)) == (f" Did you mean {meant!r}?" if meant else "")
