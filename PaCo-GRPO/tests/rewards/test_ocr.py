"""ocr: the formula against an independent computation; both readers."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import cv2
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from paco_grpo.rewards.ocr import quoted_texts, text_score, wanted_text
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item


@pytest.mark.parametrize(
    ("wanted", "read", "score"),
    [
        ("Open 24 h", "we are oPEN 24h!", 1),
        ("abcd", "bcd", 3 / 4),
        ("abcd", "xaxbxcxd", 0),
        ("kitten", "sitting", 1 - 3 / 6),
        # One character in several forms, on either side.
        ("CAFE\u0301", "CAF\u00c9", 1),
        ("Ｈｉ！", "Hi!", 1),
        ("“so-called” 1–2", "''so−called'' 1-2", 1),
        ("Stra\u00adße\u200b", "STRASSE", 1),
        ("欢迎", "歡迎", 1 / 2),
    ],
)
def test_score_is_one_minus_the_distance_per_letter(wanted, read, score):
    assert text_score(wanted, read) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('A sign that says "Open 24 h" above a door', ["Open 24 h"]),
        ('a 5½" nail, a 12" ruler and a mug with "TEA"', ["TEA"]),
        ("a board ＂HI＂ over 第3“欢迎光临”", ["HI", "欢迎光临"]),
        ('blank "  ", "\u200b" and "x"', ["x"]),
        ("no quotes", []),
    ],
)
def test_quoted_texts(prompt, texts):
    assert quoted_texts(prompt) == texts
    if texts:
        assert wanted_text(prompt) == texts[0]
        return
    with pytest.raises(ValueError, match="quotes"):
        wanted_text(prompt)


def rendered(text: str, blur: float = 0) -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).text((128, 128), text, "black", ImageFont.load_default(32), anchor="mm")
    return image.filter(ImageFilter.GaussianBlur(blur))


def test_rapidocr_reads_rendered_words_on_its_own_weights():
    texts = ["Open 24 h", "DON’T GO", "Fresh bread", "Soup"]
    images = [
        rendered("open 24 H"),
        rendered("DON'T GO"),
        rendered("Fresh bread", blur=9),
        rendered("Fresh bread"),
    ]
    items = [Item(number, f'A sign that says "{text}"') for number, text in enumerate(texts)]
    reward = build_rewards({"ocr": 1}, {"ocr": {"threads": 1}})["ocr"]
    sharp, apostrophe, unreadable, other = reward(images, items)
    assert sharp == apostrophe == 1 and unreadable == 0
    assert other == pytest.approx(text_score("Soup", "Fresh bread"))
    assert cv2.getNumThreads() == 1


def test_paddleocr_reads_where_only_it_is_installed(monkeypatch):
    """It needs an older numpy; here stands a module with its interface."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    built = []
    read = [[[None, ("Open", 0.9)], [None, ("24 h", 0.8)]], None]
    engine = SimpleNamespace(ocr=lambda image, **options: read)
    create = lambda **options: built.append(options) or engine
    module = SimpleNamespace(PaddleOCR=create, __spec__=ModuleSpec("paddleocr", None))
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    reward = build_rewards({"ocr": 1}, {"ocr": {"lang": "fr"}}, device="cuda:1")["ocr"]
    for _ in range(2):
        assert reward([rendered("")], [Item(0, '"open 24 h"')]) == [1.0]
    (options,) = built  # once
    assert options["lang"] == "fr" and options["use_gpu"]
