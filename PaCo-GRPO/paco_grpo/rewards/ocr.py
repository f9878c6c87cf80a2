"""ocr: is the text that the prompt asks for in the image? (Flow-GRPO, arXiv 2505.05470, §5.1)

The text in double quotes in the prompt is compared with what PaddleOCR reads. PaddleOCR needs an older numpy, so it
runs in a separate environment (``bash scripts/reward_service.sh ocr``); another reader can be named by import path.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item

    Reader = Callable[[Image.Image], str]

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


def wanted_text(prompt: str) -> str:
    """The text in the first pair of double quotes.

    Raises:
        ValueError: There is none.
    """
    match = _QUOTED.search(prompt)
    text = (match[1] or match[2]) if match else ""
    if not text.strip():
        raise ValueError(f"ocr needs the wanted text in double quotes in the prompt, got {prompt!r}")
    return text


def text_score(wanted: str, read: str) -> float:
    """1 − min(edit distance, len) / len in [0, 1], spaces and case ignored; 1 if ``wanted`` is contained in ``read``."""
    wanted, read = ("".join(text.split()).casefold() for text in (wanted, read))
    if wanted in read:
        return 1.0
    return 1.0 - min(edit_distance(wanted, read), len(wanted)) / len(wanted)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char != other))
    return row[-1]


class OcrScore:
    """Reads each image and compares. ``load`` returns the reader (image → text); it is called at the first image."""

    def __init__(self, load: Callable[[], Reader]) -> None:
        self._load = load
        self._reader: Reader | None = None

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1].

        Raises:
            ValueError: A prompt has no text in double quotes.
        """
        wanted = [wanted_text(item.prompt) for item in items]
        if self._reader is None:
            self._reader = self._load()
        read = [self._reader(image.convert("RGB")) for image in images]
        return np.array([text_score(a, b) for a, b in zip(wanted, read, strict=True)], dtype=np.float64)


def ocr(reader: str = "paddleocr", lang: str = "en", device: Any = "cpu") -> OcrScore:
    """Text in the image against the text in the prompt; ``server=…`` runs it in another process (see ``registry``).

    Args:
        reader: ``paddleocr``, or ``package.module:function``: a function from an RGB image to its text.
        lang: Language of PaddleOCR's recognizer.
        device: Where PaddleOCR computes.

    Raises:
        ImportError: The reader's package is not installed here.
        ValueError: ``reader`` is neither.
    """
    if reader == "paddleocr":
        import paddleocr

        return OcrScore(lambda: _paddle_reader(paddleocr, lang, str(device)))
    module, separator, name = reader.partition(":")
    if not separator:
        raise ValueError(f"ocr: reader={reader!r} is neither 'paddleocr' nor package.module:function")
    function = getattr(importlib.import_module(module), name)
    return OcrScore(lambda: function)


ocr.check_item = lambda item, kwargs: wanted_text(item.prompt)


def _paddle_reader(paddleocr: Any, lang: str, device: str) -> Reader:
    """PaddleOCR 2 (``ocr``) or 3 (``predict``) as a function from an image to its text, lines joined."""
    if hasattr(paddleocr.PaddleOCR, "predict"):
        engine = paddleocr.PaddleOCR(lang=lang, device="gpu" if device.startswith("cuda") else "cpu")
        return lambda image: " ".join(text for page in engine.predict(np.asarray(image)) for text in page["rec_texts"])
    engine = paddleocr.PaddleOCR(use_angle_cls=False, lang=lang, use_gpu=device.startswith("cuda"), show_log=False)
    return lambda image: " ".join(
        line[1][0] for page in engine.ocr(np.asarray(image), cls=False) for line in page or []
    )
