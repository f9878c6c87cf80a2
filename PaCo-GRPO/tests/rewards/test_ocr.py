"""ocr: the formula against an independent computation; both readers."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import cv2
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from paco_grpo.rewards.ocr import in_reading_order, quoted_texts, text_score, wanted_text
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


# Corners as RapidOCR gives them, clockwise from the top left, most of real pictures.
HELLO = [[16, 117], [154, 116], [154, 158], [16, 159]]
WORLD = [[315, 101], [475, 101], [475, 145], [315, 145]]


def upright(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


@pytest.mark.parametrize(
    ("boxes", "read"),
    [
        ({}, ""),
        ({"WORLD": WORLD, "HELLO": HELLO}, "HELLO WORLD"),
        (  # two lines, each rising by 15 degrees: WHERE is beside HERE
            {
                "THERE": [[286, 87], [443, 47], [456, 94], [298, 134]],
                "WHERE": [[302, 146], [390, 122], [403, 168], [315, 192]],
                "HERE": [[0, 166], [132, 130], [144, 175], [9, 211]],
                "NO": [[12, 224], [89, 203], [102, 248], [24, 269]],
            },
            "HERE THERE NO WHERE",
        ),
        (  # an arch
            {
                "THE": [[252, 98], [346, 98], [346, 142], [252, 142]],
                "HAPPY": [[401, 102], [522, 174], [497, 216], [376, 144]],
                "TO": [[106, 150], [167, 120], [190, 167], [129, 197]],
                "FARM": [[549, 205], [599, 312], [566, 334], [508, 228]],
                "WELCOME": [[0, 329], [73, 157], [124, 187], [22, 359]],
            },
            "WELCOME TO THE HAPPY FARM",
        ),
        (  # the slant of a short word is inaccurate
            {"tiny": [[397, 100], [434, 104], [432, 126], [394, 122]], "a": upright(18, 104, 30, 118)},
            "a tiny",
        ),
        (  # two small lines beside a large one
            {
                "50 %": upright(210, 8, 300, 41),
                "SALE": upright(5, 5, 190, 95),
                "OFF": upright(205, 52, 270, 90),
            },
            "SALE 50 % OFF",
        ),
        (  # two columns of three lines, one half a line lower
            {
                "1": upright(10, 10, 90, 40),
                "2": upright(150, 28, 230, 58),
                "3": upright(12, 46, 95, 76),
                "4": upright(151, 64, 239, 94),
            },
            "1 2 3 4",
        ),
    ],
)  # fmt: skip
def test_words_of_a_line_are_read_from_left_to_right(boxes, read):
    for order in (list(boxes), list(boxes)[::-1]):
        assert in_reading_order([boxes[text] for text in order], order) == read


def rendered(text: str, blur: float = 0, at=(128, 128), other: str = "") -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    font = ImageFont.load_default(32)
    ImageDraw.Draw(image).text(at, text, "black", font, anchor="mm")
    ImageDraw.Draw(image).text((40, 133), other, "black", font, anchor="mm")
    return image.filter(ImageFilter.GaussianBlur(blur))


def test_rapidocr_reads_rendered_words_on_its_own_weights():
    texts = ["Open 24 h", "DON’T GO", "Fresh bread", "Soup", "Go west"]
    images = [
        rendered("open 24 H"),
        rendered("DON'T GO"),
        rendered("Fresh bread", blur=9),
        rendered("Fresh bread"),
        rendered("WEST", at=(200, 120), other="GO"),
    ]
    items = [Item(number, f'A sign that says "{text}"') for number, text in enumerate(texts)]
    reward = build_rewards({"ocr": 1}, {"ocr": {"threads": 1}})["ocr"]
    sharp, apostrophe, unreadable, other, two_boxes = reward(images, items)
    assert sharp == apostrophe == two_boxes == 1 and unreadable == 0
    assert other == pytest.approx(text_score("Soup", "Fresh bread"))
    assert cv2.getNumThreads() == 1


def test_paddleocr_reads_where_only_it_is_installed(monkeypatch):
    """It needs an older numpy; here stands a module with its interface."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    built = []
    read = [[[WORLD, ("24 h", 0.9)], [HELLO, ("Open", 0.8)]], None]
    engine = SimpleNamespace(ocr=lambda image, **options: read)
    create = lambda **options: built.append(options) or engine
    module = SimpleNamespace(PaddleOCR=create, __spec__=ModuleSpec("paddleocr", None))
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    reward = build_rewards({"ocr": 1}, {"ocr": {"lang": "fr"}}, device="cuda:1")["ocr"]
    for _ in range(2):
        assert reward([rendered("")], [Item(0, '"open 24 h"')]) == [1.0]
    (options,) = built  # once
    assert options["lang"] == "fr" and options["use_gpu"]
