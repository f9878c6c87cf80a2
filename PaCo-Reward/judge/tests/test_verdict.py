import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_judge import verdict
from paco_judge.verdict import (
    Verdict,
    log_softmax,
    top_logprobs,
    verdict_from_top_logprobs,
    verdict_of,
)


def p_yes_from_top_logprobs(top: dict[str, float], *options: str, **asked: int) -> float | None:
    entries = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
    return verdict.p_yes_from_top_logprobs(entries, *options, **asked)


logprobs = st.floats(-700, -0.7)  # two of them add up to less than 1


@given(yes=logprobs, no=logprobs)
def test_share_against_float64(yes, no):
    expected = 1 / (1 + np.exp(np.float128(no) - np.float128(yes)))
    top = {"Yes": yes, "No": no, "the": -900.0}
    assert p_yes_from_top_logprobs(top) == pytest.approx(float(expected), abs=1e-12)


def with_others(answers: dict[str, float], count: int = 20) -> dict[str, float]:
    """A list of ``count`` log-probabilities: ``answers`` and other tokens, which share 1 %."""
    others = count - len(answers)
    return answers | {f"other {number}": math.log(0.01 / others) for number in range(others)}


# vLLM writes minus infinity as -9999; equal logarithms of nothing are no even chance.
@pytest.mark.parametrize(
    ("answers", "p_yes"),
    [
        ({"Yes": -9.0}, 1.0),
        ({"No": -8.0}, 0.0),
        ({"yes": -1.0, " Yes": -2.0, "NO": -3.0}, None),
        ({"Yes": -9999, "No": -9999}, None),
        ({"Yes": -9999, "No": -3.0}, 0.0),
        ({"Yes": -700.0, "No": -9999}, 1.0),
    ],
)
def test_an_answer_outside_the_top_has_probability_zero_and_none_has_no_score(answers, p_yes):
    assert p_yes_from_top_logprobs(with_others(answers)) == p_yes


@pytest.mark.parametrize(("answer", "p_yes"), [("Yes", 1.0), ("No", 0.0)])
def test_a_short_list_that_lacks_one_word_says_nothing(answer, p_yes):
    """A server that caps the list; the other word may be the next."""
    with pytest.raises(ValueError, match="5 of 20"):
        p_yes_from_top_logprobs(with_others({answer: -0.25}, 5))
    both = with_others({"Yes": -1.25, "No": -0.75}, 5)
    assert p_yes_from_top_logprobs(both) == pytest.approx(1 / (1 + math.exp(0.5)))
    assert p_yes_from_top_logprobs(with_others({answer: -0.25}, 5), asked=5) == p_yes


def test_variants_are_summed():
    shares = {"Yes": 0.2, " yes": 0.1, "Y": 0.1, "no": 0.05, " N": 0.15}
    shares |= {"None": 0.2, "yeS": 0.1, "Yes\n": 0.1}
    top = {token: math.log(p) for token, p in shares.items()}
    assert p_yes_from_top_logprobs(top, "variants") == pytest.approx(0.4 / 0.6)
    assert p_yes_from_top_logprobs(top, asked=8) == 1.0


# Two tokens of other words may have one text: many are incomplete characters.
OTHERS = [("\ufffd", -4.0), ("\ufffd", -5.0), ("the", -math.inf)]


@pytest.mark.parametrize(
    ("listed", "answer_tokens", "named"),
    [
        ([("Yes", -1.0), ("No", -2.0), *OTHERS], "exact", None),
        ([("Yes", 9e-4), ("No", -9999.0), ("a", -5.0)], "exact", None),
        ([("Yes", -2.5), ("No", -2.0), ("Yes", -3.0), *OTHERS], "exact", "'Yes'"),
        ([("Yes", -2.5), ("no", -2.0), ("no", -3.0), *OTHERS], "exact", None),
        ([("Yes", -2.5), ("no", -2.0), ("no", -3.0), *OTHERS], "variants", "'no'"),
        ([("Yes", -math.inf), ("No", -2.0), *OTHERS], "exact", "'Yes'"),
        ([("Yes", -1.0), ("No", -2.0), ("a", math.nan)], "exact", "'a'"),
        ([("Yes", -1.0), ("No", -2.0), ("a", math.inf)], "exact", "'a'"),
        ([("Yes", -1.0), ("No", 2e-3), *OTHERS], "exact", "'No'.*--logprobs-mode"),
        ([("Yes", 21.5), ("No", 17.0), *OTHERS], "exact", "--logprobs-mode"),
        ([("Yes", -0.5), ("No", -0.8), *OTHERS], "exact", "1.081.*--logprobs-mode"),
    ],
)
def test_log_probabilities_that_cannot_be_give_no_score(listed, answer_tokens, named):
    entries = [{"token": token, "logprob": logprob} for token, logprob in listed]
    answer = verdict_from_top_logprobs(entries, answer_tokens, asked=len(entries))
    assert answer.ok == (named is None)
    assert answer.ok or re.search(named, answer.error)


@given(st.permutations([-30.0, -7.25, 0.0, 0.5, 3.0, 29.0]), st.integers(1, 7))
def test_the_likeliest_tokens_of_logits(values, count):
    names = ["Yes", "No", "a", "b", "c", "d"]
    listed = top_logprobs(log_softmax(np.float32(values)), names.__getitem__, count)
    logits = np.float32(values).astype(np.float128)
    expected = dict(zip(names, logits - np.log(np.exp(logits).sum()), strict=True))
    kept = sorted(expected, key=expected.get, reverse=True)[:count]
    assert [entry["token"] for entry in listed] == kept
    assert [entry["logprob"] for entry in listed] == pytest.approx([expected[n] for n in kept])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_logit_that_is_no_number_makes_all_unknown_and_minus_infinity_none(wrong):
    def listed(value):
        return top_logprobs(
            log_softmax([2.0, 1.0, value, 0.5]), ["Yes", "No", "a", "b"].__getitem__
        )

    assert not verdict_from_top_logprobs(listed(wrong), asked=4).ok
    impossible = listed(-math.inf)
    assert impossible[-1] == {"token": "a", "logprob": -9999.0}
    p_yes = verdict_from_top_logprobs(impossible, asked=4).p_yes
    assert p_yes == pytest.approx(1 / (1 + math.exp(-1)))


def test_scores_of_images():
    missing = Verdict(None, "gone")
    assert verdict.mean_score([Verdict(0.25), Verdict(0.75)]) == 0.5
    assert verdict.mean_score([Verdict(0.25), missing]) is None
    assert verdict.mean_score([]) is None
    assert verdict.editing_score(Verdict(0.25), Verdict(1.0)) == 0.5
    assert verdict.editing_score(Verdict(0.25), missing) is None
    assert verdict.mean_over_dimensions({"a": [0.0, 1.0, 1.0, 1.0], "b": [0.25]}) == 0.5
    assert verdict.mean_over_dimensions({"a": [0.0], "b": [None]}) is None


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        (True, ["Yes", "Yes.", "Yes, both", "Yes\n", "Yes because", "Yes: 1"]),
        (False, ["No", "No.", "No, one differs", "No\n", "No; never"]),
        (None, ["Not sure", "None of it", "Nope", "No-one", "Noël", "Yesterday", "Yes1"]),
        (None, ["yes.", "NO", " Yes.", "The answer", ""]),
    ],
)
def test_an_answer_begins_with_the_word_yes_or_no_or_is_no_label(label, answers):
    assert [verdict_of(answer) for answer in answers] == [label] * len(answers)
