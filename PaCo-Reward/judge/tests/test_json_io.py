"""JSON from outside: a value, or one sentence."""

import pytest

from paco_judge.json_io import DamagedJson, lines, parse, parse_object


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "not JSON .*column 2"),
        (b'{"a": "\xff"}', "not JSON .*0xff"),
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
