"""ocr: the formula against an independent computation; readers by import path."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from paco_grpo.rewards.ocr import ocr, text_score, wanted_text
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
def test_score_against_a_table_of_distances(a, b):
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


def rendered(text: str, blur: float = 0) -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).text((128, 128), text, "black", ImageFont.load_default(32), anchor="mm")
    return image.filter(ImageFilter.GaussianBlur(blur))


def test_rapidocr_reads_rendered_words_on_its_own_weights():
    item = Item(0, 'A door with a sign that says "Open 24 h"')
    images = [rendered("open 24 H"), rendered("Open 24 h", 4), rendered("Open 24 h", 9), rendered("Fresh bread")]
    images.append(images[0].rotate(180))
    reward = build_rewards({"ocr": 1}, {"ocr": {"threads": 1}})["ocr"]
    sharp, blurred, unreadable, wrong, turned = reward(images, [item] * 5)
    assert sharp == 1 and unreadable == 0
    assert 0.3 < blurred < 0.95 and turned < 0.95
    assert cv2.getNumThreads() == 1
    assert wrong == pytest.approx(1 - min(table_distance("open24h", "freshbread"), 7) / 7)


def test_rapidocr_is_loaded_once_with_a_limited_number_of_threads(monkeypatch):
    import rapidocr

    engines, build = [], rapidocr.RapidOCR
    monkeypatch.setattr(rapidocr, "RapidOCR", lambda params: engines.append(build(params=params)) or engines[-1])
    for _ in range(2):
        ocr(threads=10_000)([rendered("a")], [Item(0, '"a"')])
    (engine,) = engines
    options = engine.text_rec.session.session.get_session_options()
    assert options.intra_op_num_threads == os.cpu_count() >= options.inter_op_num_threads > 0


@pytest.mark.parametrize(("method", "read"), [
    ("ocr", [[[None, ("Open", 0.9)], [None, ("24 h", 0.8)]], None]), ("predict", [{"rec_texts": ["Open", "24 h"]}]),
])  # fmt: skip
def test_paddleocr_reads_where_only_it_is_installed(method, read, monkeypatch):
    """PaddleOCR needs an older numpy; here stands a module with its interface (2: ``ocr``, 3: ``predict``)."""
    built = []
    methods = {"__init__": lambda self, **options: built.append(options), method: lambda self, image, **options: read}
    module = SimpleNamespace(PaddleOCR=type("PaddleOCR", (), methods), __spec__=ModuleSpec("paddleocr", None))
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    reward = build_rewards({"ocr": 1}, {"ocr": {"lang": f"en-{method}"}}, device="cuda:1")["ocr"]
    for _ in range(2):
        assert reward([rendered("")], [Item(0, '"open 24 h"')]) == [1.0]
    (options,) = built
    assert options["lang"] == f"en-{method}" and (options.get("use_gpu") or options.get("device") == "gpu")


def test_missing_package_and_wrong_arguments_are_errors(monkeypatch):
    with pytest.raises(RewardError, match="not installed.*paddleocr"):
        build_rewards({"ocr": 1}, {"ocr": {"reader": "paddleocr"}})
    for package in ("rapidocr", "rapidfuzz"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(RewardError, match=f"{package}.*scripts/reward_service.sh ocr.*server="):
            build_rewards({"ocr": 1})
    monkeypatch.undo()
    for wrong in ({"reader": "tesseract"}, {"threads": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            ocr(**wrong)
