"""ocr: the formula against an independent computation; readers by import path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.rewards.ocr import edit_distance, ocr, text_score, wanted_text
from paco_grpo.rewards.registry import RewardError, build_rewards
from paco_grpo.types import Item

texts = st.text(alphabet="abC ", max_size=7)


def table_distance(a: str, b: str) -> float:
    """Wagner and Fischer's whole table in float64."""
    table = np.zeros((len(a) + 1, len(b) + 1))
    table[:, 0], table[0] = np.arange(len(a) + 1), np.arange(len(b) + 1)
    for i in range(len(a)):
        for j in range(len(b)):
            table[i + 1, j + 1] = min(
                table[i, j + 1] + 1, table[i + 1, j] + 1, table[i, j] + (0.0 if a[i] == b[j] else 1.0)
            )
    return table[-1, -1]


@given(texts, texts)
def test_distance_and_score(a, b):
    assert edit_distance(a, b) == table_distance(a, b) == edit_distance(b, a)
    plain_a, plain_b = (text.replace(" ", "").lower() for text in (a, b))
    if plain_a:
        expected = 1.0 if plain_a in plain_b else 1 - min(table_distance(plain_a, plain_b), len(plain_a)) / len(plain_a)
        assert text_score(a, b) == pytest.approx(expected)
        assert 0 <= text_score(a, b) <= 1


def test_wanted_text_is_the_quoted_one():
    assert wanted_text('A sign that says "Open 24 h" above a door') == "Open 24 h"
    assert wanted_text("A sign that says “Öffnen”") == "Öffnen"
    for prompt in ("no quotes", 'empty ""', 'blank "  "', 'half "open'):
        with pytest.raises(ValueError, match="double quotes"):
            wanted_text(prompt)


def test_reader_by_import_path():
    images = [Image.new("L", (12, 8)), Image.new("RGB", (3, 4))]
    reward = build_rewards({"ocr": 1}, {"ocr": {"reader": "reward_factories:read_size"}})["ocr"]
    scores = reward(images, [Item(0, 'write "12 X 8"'), Item(1, 'write "12 x 8"')])
    assert scores == pytest.approx([1.0, text_score("12x8", "is3x4!")])


def test_missing_package_and_unknown_reader_are_errors():
    with pytest.raises(RewardError, match="not installed.*scripts/reward_service.sh ocr.*server="):
        build_rewards({"ocr": 1})
    with pytest.raises(ValueError, match="reader='tesseract'"):
        ocr(reader="tesseract")
