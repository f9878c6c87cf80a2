"""ocr: is the text that the prompt asks for in the image? (Flow-GRPO, arXiv 2505.05470, §5.1)

The text in double quotes in the prompt is compared with what a reader finds. RapidOCR (PP-OCR on ONNX Runtime, weights in
the package) reads in this process; PaddleOCR, with which older numbers were computed, in a separate environment
(``bash scripts/reward_service.sh ocr``), because it needs an older numpy.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item

Reader = Callable[[Image.Image], str]

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


def wanted_text(prompt: str) -> str:
    """The text in the first pair of double quotes. Raises ValueError: There is none."""
    match = _QUOTED.search(prompt)
    text = (match[1] or match[2]) if match else ""
    if not text.strip():
        raise ValueError(f"ocr needs the wanted text in double quotes in the prompt, got {prompt!r}")
    return text


def text_score(wanted: str, read: str) -> float:
    """1 − min(edit distance, len) / len in [0, 1], spaces and case ignored; 1 if ``wanted`` is contained in ``read``."""
    from rapidfuzz.distance import Levenshtein

    wanted, read = ("".join(text.split()).casefold() for text in (wanted, read))
    if wanted in read:
        return 1.0
    return 1.0 - min(Levenshtein.distance(wanted, read), len(wanted)) / len(wanted)


def ocr(
    reader: str | None = None, threads: int = 4, lang: str = "en", device: Any = "cpu"
) -> Callable[[Sequence[Image.Image], Sequence[Item]], np.ndarray]:
    """Text in the image against the text in the prompt; ``server=…`` runs it in another process (see ``registry``).

    Args:
        reader: ``rapidocr``, ``paddleocr``, or ``package.module:function``: a function from an RGB image to its text.
            None = ``paddleocr`` where only that is installed (its service's environment), else ``rapidocr``.
        threads: Upper limit of RapidOCR's threads (also of OpenCV's in this process). It computes on the CPU.
        lang: Language of PaddleOCR's recognizer. RapidOCR's reads English and Chinese.
        device: Where PaddleOCR computes.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    # A missing package is reported here, before training; models are loaded at the first image.
    import rapidfuzz  # noqa: F401

    if reader is None:
        only_paddle = not importlib.util.find_spec("rapidocr") and importlib.util.find_spec("paddleocr")
        reader = "paddleocr" if only_paddle else "rapidocr"
    module, _, name = reader.partition(":")
    if not name and reader not in ("rapidocr", "paddleocr"):
        raise ValueError(f"reader={reader!r} is neither 'rapidocr' nor 'paddleocr' nor package.module:function")
    package = importlib.import_module(module)
    load = {
        "rapidocr": partial(_rapidocr, threads),
        "paddleocr": partial(_paddleocr, lang, str(device).startswith("cuda")),
    }.get(reader) or partial(getattr, package, name)

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        wanted, read = [wanted_text(item.prompt) for item in items], load()
        return np.array([text_score(a, read(b.convert("RGB"))) for a, b in zip(wanted, images, strict=True)])

    return score


ocr.check_item = lambda item, kwargs: wanted_text(item.prompt)


@cache
def _rapidocr(threads: int) -> Reader:
    """RapidOCR as a function from an image to its text, lines joined; for all rewards and threads of the process."""
    import cv2
    from rapidocr import RapidOCR

    threads = min(threads, os.cpu_count() or 1)  # RapidOCR takes all cores where it is given more than there are
    cv2.setNumThreads(threads)
    limits = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")}
    # Upright text only, as PaddleOCR below; an image without text is no reason for a warning.
    engine = RapidOCR(params=limits | {"Global.use_cls": False, "Global.log_level": "error"})
    return lambda image: " ".join(engine(image).txts or ())


@cache
def _paddleocr(lang: str, gpu: bool) -> Reader:
    """PaddleOCR 2 (``ocr``) or 3 (``predict``), likewise."""
    from paddleocr import PaddleOCR

    if hasattr(PaddleOCR, "predict"):
        engine = PaddleOCR(lang=lang, device="gpu" if gpu else "cpu")
        return lambda image: " ".join(text for page in engine.predict(np.asarray(image)) for text in page["rec_texts"])
    engine = PaddleOCR(use_angle_cls=False, lang=lang, use_gpu=gpu, show_log=False)
    return lambda image: " ".join(
        line[1][0] for page in engine.ocr(np.asarray(image), cls=False) for line in page or []
    )
