"""JSON from outside, and the answers of any server: a value, or one sentence; never another exception, never a score."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paco_judge import transport
from paco_judge.client import JudgeClient, _read_answer
from paco_judge.grid import PromptLayoutError, split_prompt
from paco_judge.json_io import DamagedJson, lines, parse, parse_object
from paco_judge.verdict import Verdict

top_logprobs = [{"token": "Yes", "logprob": -0.25}, {"token": "No", "logprob": -1.5}, {"token": "A", "logprob": -9.0}]
ANSWER = {"choices": [{"index": 0, "logprobs": {"content": [top_logprobs[0] | {"top_logprobs": top_logprobs}]}}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "not JSON .*column 2"),
        (b'{"a": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        (r'["\ud800"]', "surrogate"),
        (b"", "not JSON"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(text, said):
    with pytest.raises(DamagedJson, match=said) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_byte_order_mark_and_other_line_ends_are_accepted(tmp_path):
    assert parse(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(DamagedJson, match="not a JSON object but a list"):
        parse_object("[1]")
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"a": "1\u2028"}\r\n\n{"a": 2}'.encode())
    assert [(number, parse(line)["a"]) for number, line in lines(file)] == [(1, "1\u2028"), (3, 2)]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60))
@example(b"-" + b"9" * 4301)
def test_any_bytes_are_json_or_damaged(content):
    try:
        parse(content)
    except DamagedJson as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- answers of a judge


def top(*logprobs: object) -> bytes:
    entries = [{"token": token, "logprob": value} for token, value in zip(("Yes", "No"), logprobs)]
    return json.dumps({"choices": [{"logprobs": {"content": [{"top_logprobs": entries}]}}]}).encode()


def test_usual_log_probabilities_are_scores():
    assert _read_answer(top(0.0, -math.inf), "exact").p_yes == 1.0
    assert _read_answer(top(0, -9999), "exact").p_yes == 1.0
    assert _read_answer(top(1e-6, -20.0), "exact").p_yes == pytest.approx(1.0)  # rounding


def changed(value, data):
    """``value`` with one part of it replaced by any JSON, or left out."""
    if not data.draw(st.integers(0, 3)) or not isinstance(value, (dict, list)) or not value:
        return data.draw(JSON)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = data.draw(st.sampled_from(list(keys)))
    if data.draw(st.booleans()) or isinstance(value, list):
        return type(value)({**value, key: changed(value[key], data)} if isinstance(value, dict) else
                           [changed(part, data) if number == key else part for number, part in enumerate(value)])  # fmt: skip
    return {name: part for name, part in value.items() if name != key}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_answer_is_a_verdict(data):
    """An error, or P(Yes) from two log-probabilities; the server's own message of an error is a text."""
    body = json.dumps(changed(ANSWER, data)).encode()
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    verdict = _read_answer(body, "exact")
    assert isinstance(verdict, Verdict) and isinstance(transport.reason(body), str)
    if verdict.ok:
        assert all(type(e["logprob"]) in (int, float) and e["logprob"] <= 1e-3
                   for e in json.loads(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
                   if e["token"] in ("Yes", "No"))  # fmt: skip


@pytest.mark.parametrize("key", ["secret\n", "a\r\nX-Other: 1", "a\0b", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_one_sentence(key):
    with pytest.raises(ValueError, match="the API key has a line break or another character") as caught:
        JudgeClient("http://127.0.0.1:1", api_key=key)
    assert key.strip() not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.text('0123456789x⨉ .[]-:TOPLEFTPANEL"\n', max_size=60))
@example("9" * 5000 + "x2 grid. PANEL-1: a")
@example("1x2 grid. PANEL-" + "1" * 5000 + ": a. PANEL-2: b")
@example("9999999x9999999 grid")
def test_any_prompt_is_a_grid_or_a_layout_error(prompt):
    try:
        split_prompt(prompt)
    except PromptLayoutError:
        pass
