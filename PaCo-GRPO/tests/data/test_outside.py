"""Prompt sets and journals that someone or a crash has damaged: one sentence with file and line, or a line skipped."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paco_grpo.data.prompts import KINDS, DataError, load_prompts

GOOD = '{"prompt": "a cat", "height": 64, "width": 64, "criteria": {"style": {"a": "same"}}}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
        (b'{"prompt": ' + b"[" * 100_000, "not JSON"),
        (b'{"prompt": "a\\u0000b"}', "field 'prompt'"),
        (b'{"prompt": "x", "height": 1' + b"0" * 400 + b', "width": 1}', "field 'height' must be an integer from 1 to"),
        (b'{"prompt": "x", "criteria": {"a": [1]}}', "field 'criteria'"),
    ],
)
def test_a_damaged_line_is_one_sentence(tmp_path, line, said):
    (tmp_path / "train_metadata.jsonl").write_bytes(GOOD.encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:3.*{said}") as caught:
        load_prompts(tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa cat\r\n")
    assert [load_prompts(tmp_path, "train", kind)[0].prompt for kind in ("geneval", "text")] == ["a cat", "a cat"]
    (tmp_path / "train.txt").write_bytes("a cat\na dog".encode("utf-16-le"))
    with pytest.raises(DataError, match="train.txt: not a text .*save it as UTF-8"):
        load_prompts(tmp_path, "train", "text")


@FILES
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=60) | st.lists(JSON | st.fixed_dictionaries(
    {"prompt": JSON}, optional={"height": JSON, "width": JSON, "criteria": JSON, "layout": JSON, "image": JSON, "idx": JSON}
), max_size=3))  # fmt: skip
@example("geneval_image", [{"prompt": "x", "image": "a" * 5000}])
@example("geneval_image", [{"prompt": "x", "image": "."}])
def test_any_prompt_set_is_read_or_a_data_error(tmp_path, kind, content):
    if isinstance(content, list):
        content = "\n".join(map(json.dumps, content)).encode()
    for name in ("train_metadata.jsonl", "train.txt", "train.parquet"):
        (tmp_path / name).write_bytes(content)
    try:
        items = load_prompts(tmp_path, "train", kind)
    except DataError as error:
        assert "\n" not in str(error).replace(repr("\n"), "")
        return
    assert items and all(item.prompt.strip() and item.prompt.encode() for item in items)
