"""ocr: is the text that the prompt asks for in the image? (Flow-GRPO, arXiv 2505.05470, §5.1)

The text in double quotes in the prompt is compared with what a reader finds. RapidOCR (PP-OCR on
ONNX Runtime, weights in the package) reads in this process. PaddleOCR, with which older numbers
were computed, reads in a separate environment (``bash scripts/reward_service.sh ocr``), because it
needs an older numpy.
"""

import importlib
import importlib.util
import math
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.contract import ScoreFn, with_attributes

Reader = Callable[[Image.Image], str]

_SAME_LINE = 0.5  # share of the lower box's height in which two boxes of a line overlap
# A word is slanted if it rises or falls by more than this share of its height; less is inaccuracy.
_SLANTED = 0.25

# A straight mark after a digit is an inch mark and begins no quotation: a 12" ruler.
_QUOTED = re.compile(r'“([^“”]+)”|(?<!\d)"([^"]+)"')
# Characters that look alike and that NFKC does not map to each other.
_ONE_FORM = str.maketrans(
    dict.fromkeys("‘’‚‛ʻʼʹ′´`｀", "'")
    | dict.fromkeys("“”„‟″«»「」『』〝〞", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | {"⁄": "/"}
)


def quoted_texts(prompt: str) -> list[str]:
    """The texts in double quotes, ``"…"`` or ``“…”``, in order; not those without a letter."""
    texts = []
    for match in _QUOTED.finditer(unicodedata.normalize("NFKC", prompt)):
        text = match[1] or match[2]
        if _comparable(text):
            texts.append(text)
    return texts


def wanted_text(prompt: str) -> str:
    """The text in the first pair of double quotes. Raises ValueError: There is none."""
    texts = quoted_texts(prompt)
    if not texts:
        raise ValueError(
            f"ocr needs the wanted text in double quotes in the prompt, got {prompt!r}"
        )
    return texts[0]


def text_score(wanted: str, read: str) -> float:
    """1 − min(edit distance, len) / len in [0, 1], or 1 if ``read`` contains ``wanted``.

    Spaces, case and forms of one character (full width, quotation marks, dashes, accents as a
    character of their own) are ignored; len is the length of ``wanted``.
    """
    from rapidfuzz.distance import Levenshtein

    target = _comparable(wanted)
    text = _comparable(read)
    if target in text:
        return 1.0
    return 1.0 - min(Levenshtein.distance(target, text), len(target)) / len(target)


def _comparable(text: str) -> str:
    """NFKC without case and what nobody sees."""
    text = unicodedata.normalize("NFKC", text.translate(_ONE_FORM)).translate(_ONE_FORM)
    text = unicodedata.normalize("NFKC", text.casefold()).replace("''", '"')
    return "".join(filter(_is_visible, text))


def _is_visible(letter: str) -> bool:
    """Not of spaces, marks of direction, soft hyphens, variation selectors and the like."""
    is_mark = unicodedata.category(letter) == "Cf" or "\ufe00" <= letter <= "\ufe0f"
    return not (is_mark or letter.isspace())


def in_reading_order(boxes: Sequence[Any], texts: Sequence[str]) -> str:
    """The texts joined: lines from top to bottom, the boxes of each from left to right.

    Boxes are on one line if their heights overlap by half, seen along their common slant. So the
    words of a slanted line, or of an arch, are one line, too.

    Args:
        boxes: (4, 2) corners of each text, clockwise from its top left.
        texts: In the same order.
    """
    if not texts:
        return ""
    corners = np.asarray(boxes, dtype=np.float64)
    centers = corners.mean(axis=1)
    top_left, top_right, bottom_right, bottom_left = (corners[:, place] for place in range(4))
    widths = (top_right + bottom_right - top_left - bottom_left) / 2  # vectors (n, 2)
    directions = widths / np.linalg.norm(widths, axis=1, keepdims=True)
    heights = np.linalg.norm(bottom_left + bottom_right - top_left - top_right, axis=1) / 2

    def downward(numbers: list[int]) -> np.ndarray:
        """The direction (2,) from a line of these boxes to the next."""
        if abs(widths[numbers, 1].sum()) <= _SLANTED * heights[numbers].sum():
            return np.array([0.0, 1.0])
        right, down = directions[numbers].sum(axis=0)
        return np.array([-down, right]) / math.hypot(right, down)

    def overlap(one: int, other: int) -> float:
        distance = abs((centers[one] - centers[other]) @ downward([one, other]))
        lower, higher = sorted((heights[one], heights[other]))
        return ((lower + higher) / 2 - distance) / lower

    everything = list(range(len(texts)))
    lines: list[list[int]] = []
    for box in sorted(everything, key=lambda box: centers[box] @ downward(everything)):
        overlaps = [min(overlap(box, other) for other in line) for line in lines]
        if max(overlaps, default=0.0) >= _SAME_LINE:
            lines[int(np.argmax(overlaps))].append(box)
        else:
            lines.append([box])
    words = []
    for line in lines:
        for box in sorted(line, key=lambda box: centers[box, 0]):
            words.append(texts[box])
    return " ".join(words)


def ocr(threads: int = 4, lang: str = "en", device: Any = "cpu") -> ScoreFn:
    """Compares the text in the image with the one in the prompt.

    PaddleOCR reads it where only that is installed, else RapidOCR.

    Args:
        threads: Upper limit of RapidOCR's threads, and of OpenCV's in this process. It computes on
            the CPU.
        lang: Language of PaddleOCR's recognizer. RapidOCR's reads English and Chinese.
        device: Of PaddleOCR.
    """
    # A missing package is reported here, before training; models are loaded at the first image.
    importlib.import_module("rapidfuzz")
    load = partial(_paddleocr, lang, str(device).startswith("cuda"))
    if importlib.util.find_spec("rapidocr") or not importlib.util.find_spec("paddleocr"):
        importlib.import_module("rapidocr")
        load = partial(_rapidocr, threads)

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        read = load()
        scores = []
        for image, item in zip(images, items, strict=True):
            target = wanted_text(item.prompt)
            scores.append(text_score(target, read(image.convert("RGB"))))
        return np.array(scores)

    return score


def _remark(item: Item) -> str | None:
    if len(quoted_texts(item.prompt)) > 1:
        return "quote more than one text: only the first is looked for"
    return None


with_attributes(ocr, check_item=lambda item: wanted_text(item.prompt), remark=_remark)


@cache
def _rapidocr(threads: int) -> Reader:
    """An image → its text; for all rewards and threads of the process."""
    import cv2
    from rapidocr import RapidOCR

    # With a larger number than there are cores, RapidOCR takes all of them.
    threads = min(threads, os.cpu_count() or 1)
    cv2.setNumThreads(threads)
    parameters = {
        "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        "EngineConfig.onnxruntime.inter_op_num_threads": threads,
        "Global.use_cls": False,  # upright text only, as PaddleOCR below
        "Global.log_level": "error",  # an image without text is no reason for a warning
    }
    engine = RapidOCR(params=parameters)

    def read(image: Image.Image) -> str:
        result: Any = engine(image)
        return in_reading_order(result.boxes, result.txts or ())

    return read


@cache
def _paddleocr(lang: str, gpu: bool) -> Reader:
    """The same with PaddleOCR 2."""
    from paddleocr import PaddleOCR  # pyright: ignore[reportMissingImports]

    engine = PaddleOCR(use_angle_cls=False, lang=lang, use_gpu=gpu, show_log=False)

    def read(image: Image.Image) -> str:
        boxes = []
        texts = []
        for page in engine.ocr(np.asarray(image), cls=False):
            for box, (text, _) in page or []:
                boxes.append(box)
                texts.append(text)
        return in_reading_order(boxes, texts)

    return read
