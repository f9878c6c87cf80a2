"""Bodies that nobody should send: for tests of everything that reads bytes from outside."""

import json

from hypothesis import strategies as st

NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(1 << 63), 1 << 64, 1e308, -0.0]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
RAW = [
    b"", b" ", b"null", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b'{"model": "\xff"}', b'{"model": "\\ud800"}',
    b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 0x1}', b"{'a': 1}",
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b'{"a": 1, "a": 2}', b"\x00", b'"' + b"a" * 100_000,
]  # fmt: skip


@st.composite
def bodies(draw, good: dict, fields: tuple[str, ...] = ()):
    """``good`` with something replaced, removed or added anywhere; its JSON damaged; or no JSON at all."""
    kind = draw(st.sampled_from(["value", "value", "value", "cut", "byte", "raw", "deep", "digits"]))
    if kind == "raw":
        return draw(st.one_of(st.sampled_from(RAW), st.binary(max_size=200)))
    body = json.loads(json.dumps(good))
    target, key = draw(st.sampled_from([*places(body), *((body, field) for field in fields)]))
    if kind == "deep":
        target[key] = "MARK"
        nested = b"[" * draw(st.sampled_from([50, 1000, 1500, 50_000]))
        return json.dumps(body).encode().replace(b'"MARK"', nested + b"]" * len(nested))
    if kind == "digits":
        target[key] = "MARK"
        digits = draw(st.sampled_from([b"9" * 5000, b"-" + b"1" * 5000, b"0." + b"3" * 5000, b"NaN", b"Infinity"]))
        return json.dumps(body).encode().replace(b'"MARK"', digits)
    target[key] = draw(VALUES)
    content = bytearray(json.dumps(body, allow_nan=True).encode())
    if kind == "cut":
        return bytes(content[: draw(st.integers(0, len(content)))])
    if kind == "byte":
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def places(value) -> list[tuple]:
    """(container, key) of everything inside ``value``."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in places(inner)]


def check_refusal(status: int, content: bytes, allowed: tuple[int, ...]) -> None:
    """An error of an ``allowed`` status in OpenAI's format, without a traceback."""
    assert status in allowed, (status, content[:500])
    assert b"Traceback" not in content and len(content) < 10_000
    error = json.loads(content, parse_constant=_no_constant)["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)


def _no_constant(name: str):
    raise ValueError(f"{name} in an answer")
