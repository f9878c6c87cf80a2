"""ocr: the formula against an independent computation; both readers."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import cv2
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from paco_grpo.rewards.ocr import text_score, wanted_text
from paco_grpo.rewards.registry import RewardError, build_rewards
from paco_grpo.types import Item


@pytest.mark.parametrize(
    ("wanted", "read", "score"),
    [
        ("Open 24 h", "we are oPEN 24h!", 1),
        ("abcd", "bcd", 3 / 4),
        ("abcd", "xaxbxcxd", 0),
        ("kitten", "sitting", 1 - 3 / 6),
        ("abc", "a very long other text", 0),
    ],
)
def test_score_is_one_minus_the_distance_per_letter(wanted, read, score):
    assert text_score(wanted, read) == pytest.approx(score)


def test_wanted_text_is_the_quoted_one():
    assert wanted_text('A sign that says "Open 24 h" above a door') == "Open 24 h"
    assert wanted_text("A sign that says “Öffnen”") == "Öffnen"
    for prompt in ("no quotes", 'blank "  "', 'half "open'):
        with pytest.raises(ValueError, match="double quotes"):
            wanted_text(prompt)


def rendered(text: str, blur: float = 0) -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).text((128, 128), text, "black", ImageFont.load_default(32), anchor="mm")
    return image.filter(ImageFilter.GaussianBlur(blur))


def test_rapidocr_reads_rendered_words_on_its_own_weights():
    item = Item(0, 'A door with a sign that says "Open 24 h"')
    images = [
        rendered("open 24 H"),
        rendered("Open 24 h", 4),
        rendered("Open 24 h", 9),
        rendered("Fresh bread"),
    ]
    images.append(images[0].rotate(180))
    reward = build_rewards({"ocr": 1}, {"ocr": {"threads": 1}})["ocr"]
    sharp, blurred, unreadable, wrong, turned = reward(images, [item] * 5)
    assert sharp == 1 and unreadable == 0
    assert 0.3 < blurred < 0.95 and turned < 0.95
    assert cv2.getNumThreads() == 1
    assert wrong == pytest.approx(text_score("Open 24 h", "Fresh bread"))


def test_paddleocr_reads_where_only_it_is_installed(monkeypatch):
    """It needs an older numpy; here stands a module with its interface.

    Without either, the error names the service.
    """
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RewardError, match="rapidocr.*scripts/reward_service.sh ocr.*server="):
        build_rewards({"ocr": 1})
    built, read = [], [[[None, ("Open", 0.9)], [None, ("24 h", 0.8)]], None]
    engine = SimpleNamespace(ocr=lambda image, **options: read)
    spec = ModuleSpec("paddleocr", None)
    module = SimpleNamespace(
        PaddleOCR=lambda **options: built.append(options) or engine, __spec__=spec
    )
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    reward = build_rewards({"ocr": 1}, {"ocr": {"lang": "fr"}}, device="cuda:1")["ocr"]
    for _ in range(2):
        assert reward([rendered("")], [Item(0, '"open 24 h"')]) == [1.0]
    (options,) = built
    assert options["lang"] == "fr" and options["use_gpu"]
