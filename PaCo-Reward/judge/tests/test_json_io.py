"""JSON from outside: a value, or one sentence."""

import pytest

from paco_judge.json_io import DamagedJson, lines, parse, parse_object


def test_what_cannot_be_used_is_one_sentence():
    for text in ("{not json", b'{"a": "\xff"}', "[" * 100_000, b"", '"\\ud83d"'):
        with pytest.raises(DamagedJson, match="^not JSON.{5,200}$"):
            parse(text)


def test_a_byte_order_mark_and_other_line_ends_are_accepted(tmp_path):
    assert parse(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(DamagedJson, match="not a JSON object but a list"):
        parse_object("[1]")
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"a": "1\u2028"}\r\n\n{"a": 2}'.encode())
    assert [(number, parse(line)["a"]) for number, line in lines(file)] == [(1, "1\u2028"), (3, 2)]
