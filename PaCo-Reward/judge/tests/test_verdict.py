import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_judge import verdict
from paco_judge.verdict import (
    Verdict,
    p_yes_from_logits,
    p_yes_from_top_logprobs,
    verdict_of,
)

logprobs = st.floats(-700, 0)


@given(yes=logprobs, no=logprobs)
def test_share_against_float64(yes, no):
    low = max(yes, no)
    expected = np.exp(np.float64(yes) - low) / (
        np.exp(np.float64(yes) - low) + np.exp(np.float64(no) - low)
    )
    assert p_yes_from_top_logprobs({"Yes": yes, "No": no, "the": -0.1}) == pytest.approx(
        expected, abs=1e-12
    )


def test_an_answer_outside_the_top_has_probability_zero_and_none_has_no_score():
    assert p_yes_from_top_logprobs({"Yes": -9.0}) == 1.0
    assert p_yes_from_top_logprobs({"No": -9.0}) == 0.0
    assert p_yes_from_top_logprobs({"yes": -0.1, " Yes": -0.2, "NO": -1.0}) is None
    assert p_yes_from_top_logprobs({}) is None


@pytest.mark.parametrize("nothing", [-math.inf, -9999.0, -9999])
def test_a_token_at_minus_infinity_has_probability_zero(nothing):
    """vLLM writes minus infinity as -9999; equal logarithms of nothing are no even chance."""
    assert p_yes_from_top_logprobs({"Yes": nothing, "No": nothing}) is None
    assert p_yes_from_top_logprobs({"Yes": nothing, "No": -3.0}) == 0.0
    assert p_yes_from_top_logprobs({"Yes": -700.0, "No": nothing}) == 1.0
    tokens = dict.fromkeys((" yes", "NO"), nothing)
    assert p_yes_from_top_logprobs(tokens, "variants") is None


def test_two_logits_at_minus_infinity_are_a_missing_score():
    assert np.isnan(p_yes_from_logits([-np.inf, -np.inf, 1.0], 0, 1))


def test_variants_are_summed():
    top = {
        "Yes": 0.2,
        " yes": 0.1,
        "Y": 0.1,
        "no": 0.05,
        " N": 0.05,
        "None": 0.3,
        "yeS": 0.1,
        "Yes\n": 0.1,
    }
    top = {token: math.log(p) for token, p in top.items()}
    assert p_yes_from_top_logprobs(top, "variants") == pytest.approx(0.8)
    assert p_yes_from_top_logprobs(top) == 1.0


@pytest.mark.parametrize("bad", [math.nan, 0.5, True, "-0.1", None])
def test_logprobs_that_are_none_are_an_error(bad):
    with pytest.raises(ValueError, match="not a log-probability"):
        p_yes_from_top_logprobs({"Yes": bad, "No": -1.0})


@given(st.lists(st.floats(-30, 30), min_size=6, max_size=6, unique=True), st.integers(1, 7))
def test_logits_agree_with_top_logprobs(values, top):
    logits = np.array(values)
    log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    names = ["Yes", "No", "a", "b", "c", "d"]
    kept = np.argsort(-logits)[:top]
    expected = p_yes_from_top_logprobs({names[i]: log_probs[i] for i in kept})
    actual = p_yes_from_logits(logits, 0, 1, top=top)
    assert np.isnan(actual) if expected is None else actual == pytest.approx(expected, abs=1e-9)


def test_logits_batch_and_summed_ids():
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    np.testing.assert_allclose(p_yes_from_logits(logits, [0, 1], 2), [0.5, 7 / 9])
    assert p_yes_from_logits(np.zeros((2, 3, 5)), 0, 1).shape == (2, 3)


def test_scores_of_images():
    assert verdict.mean_score([Verdict(0.25), Verdict(0.75)]) == 0.5
    assert verdict.mean_score([Verdict(0.25), Verdict(None, "gone")]) is None
    assert verdict.mean_score([]) is None
    assert verdict.editing_score(Verdict(0.25), Verdict(1.0)) == 0.5
    assert verdict.editing_score(Verdict(0.25), Verdict(None, "gone")) is None
    assert verdict.mean_over_dimensions({"a": [0.0, 1.0, 1.0, 1.0], "b": [0.25]}) == 0.5
    assert verdict.mean_over_dimensions({"a": [0.0], "b": [None]}) is None


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        *((text, True) for text in ("Yes", "Yes.", "Yes, both", "Yes\n", "Yes because", "Yes: 1")),
        *((text, False) for text in ("No", "No.", "No, one differs", "No\n", "No; never")),
        *((text, None) for text in ("Not sure", "None of it", "Nothing", "Nope", "No-one", "Noël")),
        *((text, None) for text in ("Yesterday", "Yes1", "yes.", "NO", " Yes.", "The answer", "")),
    ],
)
def test_an_answer_begins_with_the_word_yes_or_no_or_is_no_label(answer, verdict):
    assert verdict_of(answer) is verdict
