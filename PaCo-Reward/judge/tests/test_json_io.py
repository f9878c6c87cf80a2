"""JSON from outside, and the answers of any server: a value, or one sentence; never another exception, never a score."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paco_judge import transport
from paco_judge.client import _read_answer
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


# ---------------------------------------------------------------- answers of a judge


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
